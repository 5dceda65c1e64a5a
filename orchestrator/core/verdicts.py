"""What a lost attempt costs, and when a job is given up. PURE.

Invariant: a job that advances is never given up while the budget of its window lasts; the same loss without any step gained is.
"""

from __future__ import annotations

import re

from orchestrator.core.actions import RemoveGroup
from orchestrator.core.decision import Decision
from orchestrator.core.group_spec import HOUR
from orchestrator.core.model import Attempt, Job
from orchestrator.core.reports import known_open
from orchestrator.core.states import AttemptState, Desired, JobState, Reason
from workers.budget import TABLE
from workers.messages import Failure, FailureClass, Incident, Outcome

STALLED_LOSSES = 2  # attempts lost in a row without a new best step
FEWEST_RELAUNCHES = 3  # before a lack of progress may end a job


def lose(d: Decision, reason: Reason | str, message: str, at: float, *, told: bool = False) -> None:
    """The attempt is lost for a cause that another placement may cure. ``told``: its coordinator could still tell, in an incident."""
    if not told:
        incident = _incident(d, str(reason), message, at)
        d.record(incidents=(incident,))
        paid = Failure(at=at, kind=incident.kind, cause=incident.cause, signature=incident.cause, step=d.job.best_step)
        d.learn(failures=(*d.job.failures, paid))
        d.learn(open_incidents=known_open(d.job.open_incidents, (incident,)))
    d.learn(stalled=0 if _gained(d.job, d.attempt) else d.job.stalled + 1)
    d.attempt_is(AttemptState.REMOVING, outcome=Outcome.LOST, reason=str(reason), message=message, ended_at=at)
    if d.job.state is not JobState.CANCELLING and d.job.desired is Desired.RUN:
        d.job_is(JobState.RECOVERING, Reason.GROUP_LOST, message)
    d.do(RemoveGroup(d.job.id, d.attempt.number))


def give_up(job: Job, attempt: Attempt, now: float) -> tuple[Reason, str] | None:
    """(reason, message) when a lost attempt shall not be followed by another."""
    restart = job.spec.restart
    spent = [f for f in job.failures if TABLE[f.kind].paid_by is FailureClass.INFRASTRUCTURE and f.at > now - restart.window_hours * HOUR]
    if len(spent) > restart.max_infrastructure:
        allowed = f"restart.max_infrastructure is {restart.max_infrastructure}"
        text = f"{len(spent)} infrastructure failures within {restart.window_hours:g} h; {allowed}"
        return Reason.BUDGET_SPENT, f"{text}; the last: {attempt.message}"
    if job.stalled >= STALLED_LOSSES and attempt.number > FEWEST_RELAUNCHES:
        best = "no step was ever finished" if job.best_step is None else f"the best step is {job.best_step}"
        return Reason.NO_PROGRESS, f"{attempt.message}; so ended {job.stalled} attempts in a row without a step gained, {best}"
    return None


def budgets(job: Job, now: float) -> dict[FailureClass, tuple[int, int]]:
    """(used, limit) within the window, by the class that pays."""
    since = now - job.spec.restart.window_hours * HOUR
    payers = dict.fromkeys(price.paid_by for price in TABLE.values())
    used = [TABLE[f.kind].paid_by for f in job.failures if f.at > since]
    return {payer: (used.count(payer), TABLE[payer].budget(job.spec.restart)) for payer in payers}


def _gained(job: Job, attempt: Attempt) -> bool:
    """A script that reports no steps counts as advancing when it ran at all."""
    if job.best_step is None:
        return attempt.started_at is not None
    return attempt.prior_best_step is None or job.best_step > attempt.prior_best_step


def _incident(d: Decision, reason: str, message: str, at: float) -> Incident:
    cause = re.sub(r"(?<!^)(?=[A-Z])", "_", reason).lower()  # GroupLost: group_lost
    return Incident(
        job_id=d.job.id,
        attempt=d.attempt.number,
        generation=max(d.attempt.generation, d.attempt.first_generation),
        at=d.attempt.absent_since or at,
        cause=cause,
        kind=FailureClass.INFRASTRUCTURE,
        message=message,
        action="relaunch",
        last_step=d.job.best_step,
    )
