"""One plan for everything: first each job by itself, then room for those that wait. PURE.

Invariant: at most one step per job, and a job whose rows make no sense stops nobody else.
"""

from __future__ import annotations

from orchestrator.core import lifecycle
from orchestrator.core.actions import JobStep, Plan, RemoveGroup
from orchestrator.core.group_spec import Roots
from orchestrator.core.model import Job, World
from orchestrator.core.scheduling import Placement, rooms, schedule, suspects
from orchestrator.core.states import Desired, JobState, Reason


def plan(world: World, now: float, roots: Roots) -> Plan:
    """What to save and do for ``world`` as it was seen at ``now`` (Unix seconds)."""
    steps: dict[str, JobStep] = {}
    broken: dict[str, str] = {}
    waiting: list[Job] = []
    for job in world.jobs:
        attempt = world.attempts.get(job.id)
        key = (job.id, job.attempt)
        try:
            view, removed, problem = world.groups.get(key), key in world.removed, world.removal_problems.get(key)
            steps[job.id] = lifecycle.decide(job, attempt, view, removed, now, roots, problem)
        except Exception as error:
            broken[job.id] = f"{type(error).__name__}: {error}"
            continue
        if job.state is JobState.PENDING and job.desired is Desired.RUN and not steps[job.id].changed:
            waiting.append(job)
    for job_id, step in _queue(world, waiting, now, roots).items():
        steps[job_id] = step
    return Plan(
        steps=tuple(steps.values()),
        look_again_at=min((step.job.look_again_at for step in steps.values() if step.job.look_again_at is not None), default=None),
        sweep=tuple(RemoveGroup(*key) for key in sorted(world.strays)),
        broken=broken,
    )


def _queue(world: World, waiting: list[Job], now: float, roots: Roots) -> dict[str, JobStep]:
    if world.nodes is None:  # a reason that was found before tells more than one look without an answer
        waiting = [job for job in waiting if job.reason not in (Reason.WAITING_FOR_ROOM, Reason.WAITING_FOR_NODES)]
    if not waiting:
        return {}
    nodes = None if world.nodes is None else rooms(world.nodes, world.attempts.values(), world.groups)
    since = {job.id: lifecycle.waiting_since(job, world.attempts.get(job.id)) for job in waiting}
    answers = schedule(waiting, since, nodes, now, {job.id: suspects(job, world.attempts.get(job.id)) for job in waiting})
    steps = {}
    for job in waiting:
        answer, attempt = answers[job.id], world.attempts.get(job.id)
        if isinstance(answer, Placement):
            steps[job.id] = lifecycle.place(job, attempt, answer, now, roots)
        else:
            steps[job.id] = lifecycle.wait(job, attempt, answer, now)
    return steps
