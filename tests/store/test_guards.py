"""Guarded writes: one writer wins, the other is told, and a decision is saved whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import Engine, update
from sqlalchemy.exc import IntegrityError

from orchestrator.adapters.db.engine import writing
from orchestrator.adapters.db.store import SqlStore
from orchestrator.adapters.db.tables import JOBS
from orchestrator.core.actions import JobStep
from orchestrator.core.model import Event, Job
from orchestrator.core.states import AttemptState, Desired, JobState
from orchestrator.ports import Conflict

from .values import T0, checkpoint, full_step, incident, new_job, ordered, submitted


@pytest.fixture
def job(store: SqlStore) -> Job:
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    return job


def _history(store: SqlStore, job: Job) -> list[str]:
    return [event.reason for event in store.events(job.id, 50, None)[0]]


def test_a_step_decided_on_an_old_version_is_refused_whole(store: SqlStore, job: Job) -> None:
    asked = store.save_intent(ordered(job), Event(job.id, T0, "CancelRequested", "by the user"))
    with pytest.raises(Conflict, match=f"{job.id} is no longer at version 1"):
        store.save_step(full_step(job))
    assert store.job(job.id) == asked
    assert (store.attempts(job.id), store.incidents(job.id, 5, None)[0], store.checkpoints(job.id, 5, None)[0]) == ([], [], [])
    assert _history(store, job) == ["Submitted", "CancelRequested"]


def test_intent_on_an_old_version_is_refused_whole(store: SqlStore, job: Job) -> None:
    saved = store.save_step(full_step(job))
    with pytest.raises(Conflict):
        store.save_intent(ordered(job), Event(job.id, T0, "CancelRequested", "by the user"))
    assert store.job(job.id) == saved
    assert "CancelRequested" not in _history(store, job)


def test_each_writer_writes_its_own_columns_only(store: SqlStore, job: Job) -> None:
    step = full_step(job)
    saved = store.save_step(replace(step, job=replace(step.job, desired=Desired.CANCEL, name="other", created_at=0.0)))
    found = store.job(job.id)
    assert found is not None
    assert (found.desired, found.name, found.created_at) == (Desired.RUN, job.name, job.created_at)
    wished = replace(saved, desired=Desired.CANCEL, grace_s=1.0, state=JobState.SUCCEEDED)
    store.save_intent(wished, Event(job.id, T0, "CancelRequested", "by the user"))
    found = store.job(job.id)
    assert found is not None
    assert (found.desired, found.grace_s, found.state) == (Desired.CANCEL, 1.0, JobState.RECOVERING)


def test_two_controllers_that_read_the_same_version_do_not_both_write(
    store: SqlStore, open_store: Callable[[], SqlStore], job: Job
) -> None:
    other = open_store()
    mine, theirs = store.job(job.id), other.job(job.id)
    assert mine is not None
    assert theirs is not None
    store.save_step(full_step(mine))
    with pytest.raises(Conflict):
        other.save_step(full_step(theirs))


def test_a_write_that_fails_in_its_middle_leaves_nothing(store: SqlStore, job: Job) -> None:
    step = full_step(job)
    stray = replace(checkpoint(job, 99), job_id="job-zzzzzzzzzzzz")
    with pytest.raises(IntegrityError):
        store.save_step(replace(step, checkpoints=(*step.checkpoints, stray)))
    assert store.job(job.id) == job
    assert store.attempts(job.id) == []
    assert _history(store, job) == ["Submitted"]


def test_nothing_is_written_for_a_step_that_changes_nothing(store: SqlStore, job: Job) -> None:
    assert store.save_step(JobStep(job, None, changed=False)) == job
    assert store.job(job.id) == job


def test_a_report_that_comes_twice_changes_nothing(store: SqlStore, job: Job) -> None:
    first = store.save_step(full_step(job))
    step = full_step(first)
    second = store.save_step(replace(step, events=step.events[:1]))
    assert second.version == first.version + 1
    assert _history(store, job) == ["Submitted", "RankKilled", "Recovering"]
    assert store.incidents(job.id, 5, None)[0] == [incident(job)]
    assert len(store.checkpoints(job.id, 5, None)[0]) == 2
    assert len(store.attempts(job.id)) == 1


def test_an_incident_is_told_to_its_end(store: SqlStore, job: Job) -> None:
    seen = incident(job, resumed_step=None, recovered_at=None, recovery_seconds=None)
    at_first = store.save_step(JobStep(job, None, incidents=(seen, incident(job, generation=4))))
    store.save_step(JobStep(at_first, None, incidents=(incident(job),)))
    assert store.incidents(job.id, 5, None)[0] == [incident(job), incident(job, generation=4)]


def test_the_same_incident_twice_in_one_step_is_one(store: SqlStore, job: Job) -> None:
    store.save_step(JobStep(job, None, incidents=(incident(job, message="old"), incident(job)), checkpoints=(checkpoint(job, 1),) * 2))
    assert store.incidents(job.id, 5, None)[0] == [incident(job)]
    assert [c.url for c in store.checkpoints(job.id, 5, None)[0]] == [checkpoint(job, 1).url]


def test_pruned_checkpoints_go_and_others_stay(store: SqlStore, job: Job) -> None:
    other = new_job(2)
    store.add_job(other, submitted(other), None, "h")
    store.save_step(JobStep(other, None, checkpoints=(checkpoint(other, 1),)))
    saved = store.save_step(JobStep(job, None, checkpoints=(checkpoint(job, 1), checkpoint(job, 2))))
    store.save_step(JobStep(saved, None, pruned=(checkpoint(job, 1).url, checkpoint(other, 1).url)))
    assert [c.url for c in store.checkpoints(job.id, 5, None)[0]] == [checkpoint(job, 2).url]
    assert [c.url for c in store.checkpoints(other.id, 5, None)[0]] == [checkpoint(other, 1).url]


def test_open_jobs_are_those_that_still_need_work(store: SqlStore) -> None:
    jobs = [new_job(number) for number in range(4)]
    for job in jobs:
        store.add_job(job, submitted(job), None, "h")
    attempt = full_step(jobs[0]).attempt
    assert attempt is not None
    for job, state, attempt_state in (
        (jobs[1], JobState.SUCCEEDED, AttemptState.ENDED),
        (jobs[2], JobState.FAILED, AttemptState.REMOVING),
        (jobs[3], JobState.RUNNING, AttemptState.ACTIVE),
    ):
        of_job = replace(attempt, job_id=job.id, state=attempt_state)
        store.save_step(JobStep(replace(job, state=state, attempt=1), replace(of_job, number=1)))
    found, attempts = store.open_jobs()
    assert [job.id for job in found] == [jobs[0].id, jobs[2].id, jobs[3].id]
    assert {job_id: attempt.state for job_id, attempt in attempts.items()} == {
        jobs[2].id: AttemptState.REMOVING,
        jobs[3].id: AttemptState.ACTIVE,
    }


def test_a_row_that_cannot_be_read_does_not_hide_the_others(engine: Engine, store: SqlStore, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        store.add_job(new_job(number), submitted(new_job(number)), None, "h")
    with writing(engine) as connection:
        connection.execute(update(JOBS).where(JOBS.c.id == new_job(1).id).values(spec='{"name": 3}'))
    assert [job.id for job in store.open_jobs()[0]] == [new_job(2).id]
    assert new_job(1).id in caplog.text


def test_a_reference_means_the_id_then_the_newest_active_name(store: SqlStore) -> None:
    old, new, done = (new_job(number, name="same") for number in (1, 2, 3))
    for job in (old, new, done):
        store.add_job(job, submitted(job), None, "h")
    store.save_step(JobStep(replace(done, state=JobState.CANCELLED), None))
    for ref, expected in (("same", new.id), (old.id, old.id), (done.id, done.id)):
        found = store.job(ref)
        assert found is not None
        assert found.id == expected
    assert store.job("Same") is None
    assert [job.id for job in store.active("same")] == [new.id, old.id]


def test_words_are_saved_for_many_at_once_except_where_one_changed_meanwhile(store: SqlStore, job: Job) -> None:
    others = [new_job(number) for number in (2, 3)]
    for other in others:
        store.add_job(other, submitted(other), None, "h")
    asked = store.save_intent(ordered(job), Event(job.id, T0, "CancelRequested", "by the user"))
    told = [replace(each, message=f"position {n}", look_again_at=T0, name="other") for n, each in enumerate([job, *others])]
    store.save_told(told)
    assert store.job(job.id) == asked
    for n, other in enumerate(others, 1):
        assert store.job(other.id) == replace(other, message=f"position {n}", look_again_at=T0, version=2)
        assert _history(store, other) == ["Submitted"]
    store.save_told([])
