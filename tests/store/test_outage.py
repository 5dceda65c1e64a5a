"""Many at once, a lock that is held, a writer that is killed, a database that goes away and comes back."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag

import pytest

from orchestrator.adapters.db import engine as engine_module
from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.schema import upgrade
from orchestrator.adapters.db.store import SqlStore
from orchestrator.core.actions import JobStep
from orchestrator.core.model import Event
from orchestrator.ports import Unavailable

from .conftest import PostgresServer
from .values import T0, full_step, new_job, submitted

WRITER = """
import sys
from dataclasses import replace
from itertools import count
from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.store import SqlStore
from orchestrator.core.actions import JobStep
from tests.store.values import T0, new_job, full_step, submitted
store = SqlStore(open_engine(sys.argv[1]))
for number in count():
    job = new_job(number)
    store.add_job(job, submitted(job), f"key {number}", "h")
    store.save_step(full_step(job))
    print(job.id, flush=True)
"""


def test_fifty_submit_while_others_read_and_steps_are_saved(store: SqlStore) -> None:
    busy = new_job(4000)
    store.add_job(busy, submitted(busy), None, "h")
    done = Flag()

    def read() -> int:
        passes = 0
        while not done.is_set():
            store.jobs(None, {}, 200, None)
            store.open_jobs()
            passes += 1
        return passes

    def save() -> int:
        saved = busy
        while not done.is_set():
            saved = store.save_step(JobStep(saved, None, events=(Event(busy.id, T0, "Step", "step"),)))
        return saved.version

    def submit(number: int) -> bool:
        job = new_job(number)
        return store.add_job(job, submitted(job), f"key {number}", "h")[1]

    with ThreadPoolExecutor(54) as pool:
        readers, writer = [pool.submit(read) for _ in range(3)], pool.submit(save)
        submits = [pool.submit(submit, number) for number in range(50)]
        try:
            assert all(submit.result() for submit in submits)
        finally:
            done.set()
        assert all(reader.result() > 0 for reader in readers)
        last = writer.result()
    found = store.job(busy.id)
    assert found is not None
    assert found.version == last
    assert len(store.jobs(None, {}, 200, None)[0]) == 51


def test_a_killed_writer_leaves_whole_decisions(empty_url: str, store: SqlStore) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, empty_url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().strip() for _ in range(5)]
        process.kill()
        told += process.stdout.read().split()
    assert process.returncode == -signal.SIGKILL
    jobs = {job.id: job for job in store.jobs(None, {}, 10_000, None)[0]}
    assert set(told) <= set(jobs)
    for job in jobs.values():
        events = [event.reason for event in store.events(job.id, 9, None)[0]]
        assert events == (["Submitted"] if job.version == 1 else ["Submitted", "RankKilled", "Recovering"])
        assert len(store.attempts(job.id)) == job.version - 1
    if empty_url.startswith("sqlite"):
        with sqlite3.connect(empty_url.removeprefix("sqlite:///")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    fresh = new_job(30_000)
    assert store.add_job(fresh, submitted(fresh), "key", "h")[1]


@pytest.fixture
def quick_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, SqlStore]]:
    """A SQLite store that gives up a lock after a quarter of a second."""
    monkeypatch.setattr(engine_module, "WAIT_S", 0.25)
    path = tmp_path / "keepstep.db"
    engine = open_engine(f"sqlite:///{path}")
    upgrade(engine)
    yield path, SqlStore(engine)
    engine.dispose()


def test_writers_wait_for_a_lock_and_readers_do_not(sqlite_store: SqlStore, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "keepstep.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    jobs = [new_job(number) for number in range(20)]  # more than there are connections
    with ThreadPoolExecutor(20) as pool:
        writes = [pool.submit(sqlite_store.add_job, job, submitted(job), None, "h") for job in jobs]
        assert sqlite_store.jobs(None, {}, 5, None) == ([], None)
        assert not any(write.done() for write in writes)
        other.execute("COMMIT")
        other.close()
        assert all(write.result()[1] for write in writes)
    assert len(sqlite_store.jobs(None, {}, 50, None)[0]) == 20


def test_a_lock_that_is_never_given_back_is_unavailable(quick_file: tuple[Path, SqlStore]) -> None:
    path, store = quick_file
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(Unavailable, match="database is locked"):
        store.add_job(new_job(1), submitted(new_job(1)), None, "h")
    other.execute("COMMIT")
    other.close()
    assert store.add_job(new_job(1), submitted(new_job(1)), None, "h")[1]


def test_a_file_that_was_moved_away_is_not_made_anew(quick_file: tuple[Path, SqlStore]) -> None:
    path, store = quick_file
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    store.close()
    path.rename(path.with_suffix(".away"))
    with pytest.raises(Unavailable, match="unable to open database file"):
        store.ping()
    assert not path.exists()
    path.with_suffix(".away").rename(path)
    assert store.job(job.id) == job


def test_a_file_that_cannot_be_written_is_unavailable_for_writes(tmp_path: Path, sqlite_store: SqlStore) -> None:
    job = new_job(1)
    sqlite_store.add_job(job, submitted(job), None, "h")
    sqlite_store.close()
    # Read-only by the connection's own setting: root may write to any file.
    engine = open_engine(f"sqlite:///{tmp_path}/keepstep.db")
    with engine_module.reading(engine) as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
    store = SqlStore(engine)
    with pytest.raises(Unavailable, match="readonly database"):
        store.save_step(full_step(job))
    assert store.job(job.id) == job
    store.close()


def test_a_postgresql_server_that_restarts_is_unavailable_and_then_works(postgres: PostgresServer) -> None:
    engine = open_engine(postgres.new_database())
    upgrade(engine)
    store = SqlStore(engine)
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    calls: list[Callable[[], object]] = [
        store.ping,
        store.open_jobs,
        lambda: store.job(job.id),
        lambda: store.save_step(full_step(job)),
        lambda: store.add_job(new_job(2), submitted(new_job(2)), "k", "h"),
    ]
    postgres.stop()
    try:
        for call in calls:
            with pytest.raises(Unavailable, match="database: "):
                call()
    finally:
        postgres.start()
    for call in calls:
        call()
    engine.dispose()


def test_a_connection_cut_in_mid_transaction_is_unavailable_and_nothing_is_written(postgres: PostgresServer) -> None:
    engine = open_engine(postgres.new_database())
    upgrade(engine)
    store = SqlStore(engine)
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")

    def write() -> None:
        with engine_module.writing(engine) as connection:
            connection.exec_driver_sql("UPDATE jobs SET version = 9")
            postgres.stop()  # as an operator does: every connection is cut
            connection.exec_driver_sql("SELECT 1")

    try:
        with pytest.raises(Unavailable):
            write()
    finally:
        postgres.start()
    assert store.job(job.id) == job
    engine.dispose()


def test_a_server_that_does_not_exist_is_unavailable() -> None:
    store = SqlStore(open_engine("postgresql://nobody@127.0.0.1:1/none"))
    with pytest.raises(Unavailable, match="database: "):
        store.ping()
