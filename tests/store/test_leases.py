"""One server leads, whoever lost the lease writes nothing, on both databases."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from orchestrator.adapters.db.engine import open_engine, writing
from orchestrator.adapters.db.leases import OtherServer, SqlLeases, guard, only_server
from orchestrator.adapters.db.notices import listening
from orchestrator.adapters.db.store import SqlStore
from orchestrator.leadership import Leadership
from orchestrator.ports import LeaseLost

from .values import full_step, new_job, submitted


class Clock:
    """A steady clock that moves when told."""

    at = 100.0

    def __call__(self) -> float:
        return self.at


def servers(engine: Engine) -> tuple[Leadership, Leadership, Clock]:
    clock = Clock()
    first, second = (Leadership(SqlLeases(engine), name, "here", threading.Event(), monotonic=clock) for name in ("a", "b"))
    return first, second, clock


def test_a_lease_is_taken_once_and_again_when_it_was_given_back(engine: Engine) -> None:
    first, second, _ = servers(engine)
    first.beat()
    second.beat()
    assert (first.fence, second.fence) == (1, None)
    first.stop()
    second.beat()
    assert (first.fence, second.fence) == (None, 2)


def test_a_leader_that_sleeps_loses_the_lease_and_knows_it_when_it_wakes(engine: Engine) -> None:
    first, second, clock = servers(engine)
    first.beat()
    for _ in range(8):  # it is renewed, so it stays
        clock.at += 0.5
        first.beat()
        second.beat()
    assert (first.fence, second.fence) == (1, None)
    clock.at += 1.9
    second.beat()
    assert (first.fence, second.fence) == (1, None)
    clock.at += 0.2
    assert first.fence is None  # by its own clock, before anyone else may take it
    with pytest.raises(LeaseLost):
        first.require()
    clock.at += 1.0
    second.beat()
    assert second.fence == 2
    first.beat()
    assert (first.fence, first.lost, second.require()) == (None, 1, 2)


def test_a_lease_that_only_could_not_be_renewed_for_a_while_is_kept(engine: Engine) -> None:
    clock, wake = Clock(), threading.Event()
    first = Leadership(SqlLeases(engine), "a", "here", wake, monotonic=clock)
    first.beat()
    clock.at += 60
    assert first.fence is None
    wake.clear()
    first.beat()
    assert (first.fence, first.lost, wake.is_set()) == (1, 0, True)


def test_the_lease_of_another_cluster_is_never_taken(engine: Engine) -> None:
    first, _, clock = servers(engine)
    first.beat()
    other = Leadership(SqlLeases(engine), "c", "elsewhere", threading.Event(), monotonic=clock)
    for _ in range(20):
        clock.at += 1
        other.beat()
    assert other.fence is None


def test_of_two_that_take_at_once_one_leads(engine: Engine) -> None:
    leases = SqlLeases(engine)
    known = leases.lease()
    assert [taken is not None for taken in (leases.take(known, "a", "here"), leases.take(known, "b", "here"))] == [True, False]
    assert leases.lease().holder == "a"


def test_who_lost_the_lease_writes_nothing(engine: Engine) -> None:
    store, leases = SqlStore(engine), SqlLeases(engine)
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    old = leases.take(leases.lease(), "a", "here")
    assert old is not None
    new = leases.take(leases.lease(), "b", "here")
    assert new is not None
    with pytest.raises(LeaseLost, match="lease 1 is over, 2 leads"):
        store.save_step(full_step(job), old.fence)
    with pytest.raises(LeaseLost):
        store.save_told([job], old.fence)
    assert leases.renew(old, None) is None
    assert store.job(job.id) == job
    assert store.save_step(full_step(job), new.fence).version == 2


def test_a_lease_cannot_be_taken_while_its_leader_commits_but_can_be_renewed(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    leases = SqlLeases(engine)
    mine = leases.take(leases.lease(), "a", "here")
    assert mine is not None
    order: list[str] = []

    def take() -> None:
        assert leases.take(leases.lease(), "b", "here") is not None
        order.append("taken")

    with writing(engine) as connection:
        guard(connection, mine.fence)
        mine = leases.renew(mine, 1.0)
        assert mine is not None
        other = threading.Thread(target=take)
        other.start()
        other.join(0.3)
        order.append("committed")
    other.join(10)
    assert order == ["committed", "taken"]


def test_what_another_server_writes_wakes_this_one(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one server")
    wake, store = threading.Event(), SqlStore(engine)
    with listening(engine, wake):
        assert wake.wait(10)  # it listens
        for number in range(2):
            wake.clear()
            job = new_job(number)
            store.add_job(job, submitted(job), None, "h")
            assert wake.wait(10)
        with writing(engine) as connection:
            connection.execute(text("SELECT 1"))
    engine.dispose()


def test_a_sqlite_file_has_one_server(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keepstep.db"
    with only_server(url) as sole:
        assert sole
        with pytest.raises(OtherServer, match="SQLite serves one; set KEEPSTEP_DATABASE_URL to a PostgreSQL"), only_server(url):
            pass
        open_engine(url).dispose()
    with only_server(url) as sole:
        assert sole
    with only_server("postgresql://u@h/d") as sole:
        assert not sole
