"""What is saved of a report that tells the whole attempt again: each record once, whatever clocks say, and no incident stays open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.core.actions import JobStep
from orchestrator.core.lifecycle import decide
from orchestrator.core.model import Attempt, Job
from orchestrator.core.states import JobState
from tests.core.make import NOW, ROOTS, attempt, job, seen
from workers.messages import CheckpointCheck, CheckpointRecord, FailureClass, GroupPhase, Incident


class Told:
    """A job that trains, and what its coordinator's reports, each newer than the one before, have saved."""

    def __init__(self) -> None:
        self.job: Job = job(JobState.RUNNING, attempt=1, started_at=NOW - 40, generation=2)
        self.attempt: Attempt = attempt(generation=2)

    def report(self, phase: GroupPhase = GroupPhase.RUNNING, **changes: Any) -> JobStep:
        view = seen(phase, version=self.attempt.report_version + 1, **changes)
        step = decide(self.job, self.attempt, view, False, NOW, ROOTS)
        assert step.attempt is not None
        self.job, self.attempt = step.job, step.attempt
        return step


def checkpoint(step: int, at: float) -> CheckpointRecord:
    return CheckpointRecord("job-aaaaaaaaaaaa", 1, 0, step, f"/c/{step}", 10, 1, 1, at, 1.0)


def incident(generation: int, recovered_at: float | None = None) -> Incident:
    return Incident(
        "job-aaaaaaaaaaaa", 1, generation, NOW, "signal", FailureClass.UNKNOWN, "x", "restart_in_place", recovered_at=recovered_at
    )


def test_checkpoints_of_an_earlier_clock_are_saved_too() -> None:
    told = Told()
    first, second, third = checkpoint(10, NOW), checkpoint(20, NOW + 9), checkpoint(30, NOW - 3600)
    checks = tuple(CheckpointCheck(c.url, c.committed_at + 1, None) for c in (first, second, third))
    step = told.report(checkpoints=(first, second), checks=checks[:2])
    assert (step.checkpoints, step.checks) == ((first, second), checks[:2])
    step = told.report(checkpoints=(first, second, third), checks=checks)
    assert (step.checkpoints, step.checks) == ((third,), checks[2:])
    step = told.report(checkpoints=(second, third), checks=checks[1:])
    assert (step.checkpoints, step.checks) == ((), ())


def test_incidents_of_failures_in_a_row_end_when_a_later_generation_trains() -> None:
    told = Told()
    for generation in (3, 4, 5):
        failed = tuple(incident(g) for g in range(2, generation))
        told.report(GroupPhase.RECOVERING, generation=generation, incidents=failed)
    ended = tuple(incident(g, NOW + 3) for g in (2, 3, 4))
    assert told.report(generation=5, incidents=ended).incidents == ended
    assert told.report(generation=5, incidents=ended).incidents == ended[2:]


def test_incidents_that_nobody_looked_at_end_too() -> None:
    told = Told()
    told.job = replace(told.job, generation=2)
    ended = tuple(incident(g, NOW + 3) for g in (1, 2, 3, 4))
    assert told.report(generation=5, incidents=ended).incidents == ended
