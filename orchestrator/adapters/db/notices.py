"""Wakes the reconciler of one server when another one has written what a user wants. PostgreSQL only; nothing rests on it but speed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

_log = logging.getLogger(__name__)
CHANNEL = "keepstep"
LOOK_S = 1.0  # between two looks whether to stop
PAUSE_S = 5.0  # before a lost connection is made anew


def notify(connection: Connection) -> None:
    """Heard by all servers when the transaction commits."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_notify(:channel, '')"), {"channel": CHANNEL})


@contextmanager
def listening(engine: Engine, wake: threading.Event) -> Iterator[None]:
    """``wake`` is set at each notice while the context lasts."""
    if engine.dialect.name != "postgresql":
        yield
        return
    stopping = threading.Event()
    thread = threading.Thread(target=_listen, args=(engine, wake, stopping), name="keepstep-notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(2 * LOOK_S)


def _listen(engine: Engine, wake: threading.Event, stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text(f"LISTEN {CHANNEL}"))
                wake.set()  # what was written while nobody listened
                driver = connection.connection.driver_connection
                assert driver is not None
                while not stopping.is_set():
                    for _ in driver.notifies(timeout=LOOK_S):
                        wake.set()
                connection.execute(text("UNLISTEN *"))
        except (DBAPIError, OSError) as error:
            _log.warning("notices of the database are not heard now: %s", error)
            stopping.wait(PAUSE_S)
        except Exception:
            _log.exception("notices of the database are not heard now")
            stopping.wait(PAUSE_S)
