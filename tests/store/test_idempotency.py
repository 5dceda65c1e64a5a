"""One request, one job: whatever is repeated, at whatever moment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import Engine, delete

from orchestrator.adapters.db.engine import writing
from orchestrator.adapters.db.store import SqlStore
from orchestrator.adapters.db.tables import JOBS
from orchestrator.core.model import Job
from orchestrator.ports import KeyReused

from .values import new_job, spec, submitted


def test_the_same_key_and_body_give_the_same_job(store: SqlStore) -> None:
    first, second = new_job(1), new_job(2)
    assert store.add_job(first, submitted(first), "k", "h") == (first, True)
    assert store.add_job(second, submitted(second), "k", "h") == (first, False)
    assert store.job(second.id) is None
    assert [event.reason for event in store.events(first.id, 9, None)[0]] == ["Submitted"]


def test_the_same_key_with_another_body_is_refused(store: SqlStore) -> None:
    first, second = new_job(1), new_job(2)
    store.add_job(first, submitted(first), "k", "h")
    with pytest.raises(KeyReused, match="'k' was used with another body"):
        store.add_job(second, submitted(second), "k", "other")
    assert store.jobs(None, {}, 9, None) == ([first], None)


def test_without_a_key_every_request_is_a_new_job(store: SqlStore) -> None:
    for number in (1, 2):
        assert store.add_job(new_job(number), submitted(new_job(number)), None, "h")[1]


def test_twenty_requests_at_once_give_one_job(store: SqlStore) -> None:
    start = Barrier(20)

    def post(number: int) -> tuple[Job, bool]:
        job = new_job(number, spec=spec("x", labels={"a": "b"}))
        start.wait()
        return store.add_job(job, submitted(job), "k", "h")

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert sum(created for _, created in answers) == 1
    assert len({job.id for job, _ in answers}) == 1
    assert store.jobs(None, {"a": "b"}, 50, None)[0] == [answers[0][0]]


def test_a_request_that_died_before_its_commit_leaves_its_key_free(store: SqlStore) -> None:
    first, second = new_job(1), new_job(2)
    store.add_job(first, submitted(first), None, "h")
    with pytest.raises(Exception, match=r"(?i)unique"):
        store.add_job(first, submitted(first), "k", "h")  # the id is taken: fails after the key was written
    assert store.add_job(second, submitted(second), "k", "h") == (second, True)


def test_a_key_goes_with_its_job(engine: Engine, store: SqlStore) -> None:
    first, second = new_job(1), new_job(2)
    store.add_job(first, submitted(first), "k", "h")
    with writing(engine) as connection:
        connection.execute(delete(JOBS).where(JOBS.c.id == first.id))
    assert store.add_job(second, submitted(second), "k", "other") == (second, True)
    assert store.events(first.id, 9, None) == ([], None)
