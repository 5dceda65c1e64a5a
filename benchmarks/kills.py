"""What a kill costs, by the ranks' own logs.

The newest step before is the highest that rank 0's old process logged, which outlives the kill of another rank for a moment; the recovery
ends with the first higher step of a later process. Steps that later processes logged up to there were done again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from systems.system import Job, Step, wait_for

SETTLE_STEPS = 20  # between a recovery and the next kill
COME_BACK_S = 60.0  # a system that makes no new step within this time is taken for hung


class Cost(NamedTuple):
    """Seconds from the kill to the next new step (infinite: none came), steps done again."""

    seconds: float
    again: int


def first_step(job: Job, limit_s: float = 120.0) -> Step:
    step: Step = wait_for(job.steps, limit_s, "the first step")[0]
    return step


def settle(job: Job) -> None:
    """Wait until training goes on as before the last kill."""
    before = len(job.steps())
    wait_for(lambda: len(job.steps()) >= before + SETTLE_STEPS, COME_BACK_S, "a settled training")


def kill(job: Job) -> Cost:
    """Kill the last rank of a settled training, and wait for the next new step."""
    settle(job)
    at = job.kill_last_rank()
    try:
        wait_for(lambda: cost(job.steps(), at), COME_BACK_S, "a new step")
    except TimeoutError:
        return Cost(math.inf, 0)
    known = cost(job.steps(), at)
    assert known is not None
    return known


def cost(steps: list[Step], at: float) -> Cost | None:
    """Of a kill at this time (Unix seconds); None while no new step is known. ``steps``: rank 0's, oldest first."""
    old = [s for s in steps if s.at <= at][-1].pid
    last = max(s.step for s in steps if s.pid == old)
    later = [s for s in steps if s.at > at and s.pid != old]
    for index, step in enumerate(later):
        if step.step > last:
            return Cost(step.at - at, index)
    return None
