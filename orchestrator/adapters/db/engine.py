"""Connections to SQLite and PostgreSQL, set up so that both behave alike.

Invariants: a transaction that writes takes SQLite's write lock at its begin (a reader that turns writer fails at once, whatever the busy
timeout); a wait for a lock or a dead server ends within ``WAIT_S`` seconds; a SQLite file that is missing is an error, never a new empty
database, except at ``open_engine``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError, TimeoutError
from sqlalchemy.pool import StaticPool

from orchestrator.ports import Unavailable

WAIT_S = 10
_NO_TABLE = ("no such table", "does not exist")  # as SQLite and PostgreSQL say it
_turns: WeakKeyDictionary[Engine, threading.Lock] = WeakKeyDictionary()
_WRITE = "keepstep_write"
# No transaction waits for anything but the database: one that is idle for seconds is that of a server that sleeps, and holds up all others.
_POSTGRES_OPTIONS = f"-c lock_timeout={WAIT_S}s -c statement_timeout=30s -c idle_in_transaction_session_timeout=3s"
_POSTGRES_SOCKET = {"connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}


def open_engine(url: str | URL) -> Engine:
    """An engine for ``sqlite:///path`` or ``postgresql://...``; makes the SQLite file and its folder if missing. Raises ValueError."""
    try:
        parsed = make_url(url)
    except Exception as error:
        raise ValueError("database_url: not a database URL; expected sqlite:////path/to/file.db or postgresql://user@host/name") from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return _sqlite(parsed)
    if backend == "postgresql":
        return _postgresql(parsed)
    raise ValueError(f"database_url: {backend} is not supported; use sqlite:////path/to/file.db or postgresql://user@host/name")


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction that writes. Raises Unavailable when the database does not answer."""
    with answering(), _turn(engine), engine.connect().execution_options(**{_WRITE: True}) as connection, connection.begin():
        yield connection


@contextmanager
def _turn(engine: Engine) -> Iterator[None]:
    """SQLite has one writer: the others queue here, where waking is prompt, and leave the connections to readers."""
    lock = _turns.get(engine)
    if lock is None:
        yield
    elif lock.acquire(timeout=WAIT_S):
        try:
            yield
        finally:
            lock.release()
    else:
        raise Unavailable(f"database: other writers did not end within {WAIT_S} s")


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """One transaction that only reads. Raises Unavailable when the database does not answer."""
    with answering(), engine.begin() as connection:
        yield connection


@contextmanager
def answering() -> Iterator[None]:
    """Turns what a database that cannot serve raises into Unavailable; errors in what was asked for pass."""
    try:
        yield
    except (OperationalError, InterfaceError, ProgrammingError) as error:
        missing = any(sign in str(error.orig) for sign in _NO_TABLE)
        if isinstance(error, ProgrammingError) and not missing:
            raise
        raise Unavailable(f"database: {error.orig}" + ("; run `keepstep db upgrade`" if missing else "")) from error
    except TimeoutError as error:
        raise Unavailable(f"database: all connections are busy for {WAIT_S} s") from error
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        raise Unavailable(f"database: {error.orig}") from error


def _sqlite(url: URL) -> Engine:
    if url.database in (None, "", ":memory:"):
        engine = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    else:
        path = Path(str(url.database)).expanduser().absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        existing = url.set(database=f"file:{quote(str(path))}", query={"mode": "rw", "uri": "true"})
        engine = create_engine(existing, connect_args={"timeout": WAIT_S}, pool_size=8, max_overflow=0, pool_timeout=WAIT_S)
    _turns[engine] = threading.Lock()
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver must not begin by itself; _begin_sqlite does
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA journal_mode = WAL")
    # FULL, not NORMAL: a commit that power loss takes back may be a placement whose group already trains. Writes are few.
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITE) else "BEGIN")


def _postgresql(url: URL) -> Engine:
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    wanted: dict[str, str | int] = {"options": _POSTGRES_OPTIONS, "application_name": "keepstep", **_POSTGRES_SOCKET}
    arguments = {name: value for name, value in wanted.items() if name not in url.query}  # the user's own come first
    return create_engine(url, connect_args=arguments, pool_pre_ping=True, pool_size=8, max_overflow=8, pool_timeout=WAIT_S)
