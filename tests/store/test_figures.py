"""Counts over all jobs, on both databases."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.adapters.db.store import SqlStore
from orchestrator.core.actions import JobStep
from orchestrator.core.figures import RECOVERY_S, WAIT_S, Spread
from orchestrator.core.model import Attempt
from orchestrator.core.states import AttemptState, JobState

from .values import T0, checkpoint, incident, new_job, submitted


def spread(bounds: tuple[float, ...], *values: float) -> Spread:
    """Worked out here by plain counting."""
    return Spread(bounds, tuple(sum(value <= bound for value in values) for bound in bounds), len(values), sum(values))


def test_an_empty_database_has_figures(store: SqlStore) -> None:
    figures = store.figures()
    assert figures.jobs == dict.fromkeys(JobState, 0)
    assert (figures.queue_wait, figures.start) == (spread(WAIT_S), spread(WAIT_S))
    assert (figures.recovery, figures.lost_steps, figures.failures, figures.checkpoints, figures.unreachable) == ({}, {}, {}, 0, 0)


def test_figures_are_those_of_the_rows(store: SqlStore) -> None:
    fast = {"drill": None, "recovery_seconds": 0.25, "lost_steps": 0}
    slow = {"drill": None, "recovery_seconds": 7200.0, "lost_steps": 40, "cause": "node_lost"}
    lasting = {"drill": None, "recovery_seconds": None, "lost_steps": None, "recovered_at": None}
    for number, wait in enumerate((0.5, 5.0, 40.0)):
        job = replace(new_job(number), created_at=T0)
        store.add_job(job, submitted(job), None, "h")
        attempt = Attempt(job.id, 1, AttemptState.ACTIVE, (), 1.0, 0, 1.0, created_at=T0 + wait)
        again = replace(attempt, number=2, created_at=T0 + 9999)
        trains = replace(job, state=JobState.RUNNING, attempt=1, started_at=T0 + 2 * wait, unreachable_since=T0 if number else None)
        seen = [incident(job, generation, **fields) for generation, fields in enumerate((fast, slow, lasting, {}))]
        saved = store.save_step(JobStep(trains, attempt, (), tuple(seen), (checkpoint(job, 16),)))
        store.save_step(JobStep(saved, again))
    waits = store.add_job(new_job(9), submitted(new_job(9)), None, "h")[0]
    figures = store.figures()
    assert waits.state is JobState.PENDING
    assert figures.jobs == {**dict.fromkeys(JobState, 0), JobState.RUNNING: 3, JobState.PENDING: 1}
    assert figures.queue_wait == spread(WAIT_S, 0.5, 5.0, 40.0)
    assert figures.start == spread(WAIT_S, 1.0, 10.0, 80.0)
    assert figures.recovery == {"signal": spread(RECOVERY_S, 0.25, 0.25, 0.25), "node_lost": spread(RECOVERY_S, 7200.0, 7200.0, 7200.0)}
    assert figures.lost_steps == {"signal": 0, "node_lost": 120}
    assert figures.failures == {("signal", "infrastructure"): 6, ("node_lost", "infrastructure"): 3}
    assert (figures.checkpoints, figures.unreachable) == (3, 2)
    store.delete_job(new_job(1).id)
    store.delete_job(waits.id)
    later = store.figures()
    assert later.jobs == {**dict.fromkeys(JobState, 0), JobState.RUNNING: 2}
    assert (later.checkpoints, later.unreachable) == (2, 1)
    counted = ("queue_wait", "start", "recovery", "lost_steps", "failures")
    assert [getattr(later, name) for name in counted] == [getattr(figures, name) for name in counted]  # counters do not fall
