"""The plan over many jobs at once."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.actions import CreateGroup, RemoveGroup
from orchestrator.core.model import Job, World
from orchestrator.core.plan import plan
from orchestrator.core.states import AttemptState, Desired, JobState
from tests.core.make import NOW, ROOTS, SILENT, attempt, job, node, seen

A, B, C = "job-aaaaaaaaaaaa", "job-bbbbbbbbbbbb", "job-cccccccccccc"


def test_one_bad_job_stops_nobody_else() -> None:
    bad = replace(job(JobState.RUNNING, A, attempt=1), spec=None)  # type: ignore[arg-type]
    world = World((bad, job(id=B)), {A: attempt()}, {(A, 1): seen()}, (node("n1"),))
    decided = plan(world, NOW, ROOTS)
    assert list(decided.broken) == [A]
    assert [(s.job.id, s.job.state) for s in decided.steps] == [(B, JobState.STARTING)]


def test_a_job_gets_one_step_and_room_in_order() -> None:
    young, old = job(id=B, created_at=NOW), job(id=C, created_at=NOW - 9)
    world = World((young, old), {}, {}, (node("n1", cpus=1),))
    steps = {s.job.id: s for s in plan(world, NOW, ROOTS).steps}
    assert len(steps) == 2
    assert [isinstance(a, CreateGroup) for a in steps[C].actions] == [True]
    assert (steps[B].job.reason, steps[B].actions) == ("WaitingForRoom", ())


def test_a_cancelled_job_takes_no_room() -> None:
    world = World((job(id=B, desired=Desired.CANCEL, created_at=1.0), job(id=C)), {}, {}, (node("n1", cpus=1),))
    steps = {s.job.id: s.job.state for s in plan(world, NOW, ROOTS).steps}
    assert steps == {B: JobState.CANCELLED, C: JobState.STARTING}


def test_what_was_found_before_outlives_a_look_without_an_answer() -> None:
    waits = job(id=B, reason="WaitingForRoom", message="needs more")
    new = job(id=C)
    steps = {s.job.id: s for s in plan(World((waits, new), {}, {}, None), NOW, ROOTS).steps}
    assert not steps[B].changed
    assert steps[C].job.reason == "Unreachable"


def test_strays_are_swept_and_the_next_look_is_known() -> None:
    running: Job = job(JobState.RUNNING, A, attempt=1)
    world = World((running,), {A: attempt(AttemptState.ACTIVE)}, {(A, 1): SILENT}, (), strays=frozenset({(B, 1)}))
    decided = plan(world, NOW, ROOTS)
    assert decided.sweep == (RemoveGroup(B, 1),)
    assert decided.look_again_at == NOW + 10
