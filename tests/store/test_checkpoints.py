"""What is known of checkpoints: readings, of which the latest counts, and pins."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.adapters.db.store import SqlStore
from orchestrator.core.model import Job
from workers.messages import CheckpointCheck

from .values import T0, checkpoint, full_step, known, new_job, ordered, submitted


def saved(store: SqlStore) -> Job:
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    step = full_step(ordered(job))
    older = checkpoint(job, 17, generation=1, url="/older")
    store.save_step(replace(step, job=replace(step.job, version=1), checkpoints=(older, *step.checkpoints), checks=()))
    return job


def test_the_latest_reading_counts(store: SqlStore) -> None:
    job = saved(store)
    url = checkpoint(job, 17).url
    for at, problem in ((T0 + 5, "flipped"), (T0 + 4, None)):
        store.save_check(job.id, CheckpointCheck(url, at, problem))
    assert store.checkpoint(job.id, 17) == known(job, 17, verified_at=T0 + 5, problem="flipped")
    store.save_check(job.id, CheckpointCheck(url, T0 + 6, None))
    assert store.checkpoint(job.id, 17) == known(job, 17, verified_at=T0 + 6)
    assert store.checkpoint(job.id, 16) == known(job, 16)


def test_a_report_that_comes_again_changes_neither_pin_nor_reading(store: SqlStore) -> None:
    job = saved(store)
    found = store.checkpoint(job.id, 17)
    assert found is not None
    store.save_pin(job.id, found.url, T0)
    store.save_check(job.id, CheckpointCheck(found.url, T0 + 5, "flipped"))
    step = full_step(ordered(job))
    store.save_step(replace(step, job=replace(step.job, version=2), checks=()))
    assert store.checkpoint(job.id, 17) == known(job, 17, verified_at=T0 + 5, problem="flipped", pinned_at=T0)
    store.save_pin(job.id, found.url, None)
    assert store.checkpoint(job.id, 17) == known(job, 17, verified_at=T0 + 5, problem="flipped")


def test_only_the_jobs_own(store: SqlStore) -> None:
    job = saved(store)
    store.save_pin("job-of-another", checkpoint(job, 17).url, T0)
    store.save_check("job-of-another", CheckpointCheck(checkpoint(job, 17).url, T0, "x"))
    assert store.checkpoint(job.id, 17) == known(job, 17)
    assert store.checkpoint(job.id, 99) is None
