"""What becomes of one job now: (job, newest attempt, what is seen of its group, now) -> one JobStep. PURE.

Invariants
- A job takes its next or final state only when its attempt is ENDED, and an attempt is ENDED only after its removal was complete and
  nothing of it was seen afterwards. So two groups of a job never exist by our will, and nothing is left behind a final job.
- A group that cannot be seen is left alone: silence is no evidence of death. Only Ray's answer that it does not exist, twice, counts.
- Budgets are counted from what the attempts reported and are kept in the job, so they survive every restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.core.actions import CreateGroup, EndGroup, JobStep, RemoveGroup
from orchestrator.core.decision import Decision
from orchestrator.core.group_spec import HOUR, Roots, group_spec
from orchestrator.core.model import Attempt, GroupView, Job, Presence
from orchestrator.core.reports import learn
from orchestrator.core.scheduling import Placement, Waiting
from orchestrator.core.states import AttemptState, Desired, JobState, Reason
from orchestrator.core.verdicts import give_up, lose
from workers.messages import GroupPhase, GroupReport, Outcome

ABSENT_S = 3.0  # Ray must say for this long that a group does not exist
UNREACHABLE_S = 10.0  # shorter silences are not worth telling
END_MARGIN_S = 60.0  # after the grace, before a group that does not end is removed
START_MARGIN_S = 60.0  # the coordinator's own verdict about a slow start comes first

# What a group's phase makes of its job, and what is said where the coordinator says nothing.
STATE_OF_PHASE: dict[GroupPhase, tuple[JobState, Reason, str] | None] = {
    GroupPhase.PLACING: (JobState.STARTING, Reason.PLACED, "its agents are being started"),
    GroupPhase.WARMING: (JobState.STARTING, Reason.WARMING, "launchers import the framework"),
    GroupPhase.STARTING: (JobState.STARTING, Reason.LAUNCHED, "its ranks are being started"),
    GroupPhase.RUNNING: (JobState.RUNNING, Reason.TRAINING, "trains"),
    GroupPhase.RECOVERING: (JobState.RECOVERING, Reason.RECOVERING, "its ranks are being started again"),
    GroupPhase.ENDING: None,  # stays what it was until the outcome is known
    GroupPhase.ENDED: None,
}


@dataclass(frozen=True)
class Seen:
    """One look at a group; ``report`` is its newest, None where it was not PRESENT or told less than we know already."""

    presence: Presence
    report: GroupReport | None
    roots: Roots


def decide(
    job: Job, attempt: Attempt | None, view: GroupView | None, removed: bool, now: float, roots: Roots, problem: str | None = None
) -> JobStep:
    """``view`` is needed unless the attempt is ENDED or missing; ``removed``: the removal was complete before this look; ``problem``:
    why it was not."""
    d = Decision(job, attempt, now)
    if attempt is None or attempt.state is AttemptState.ENDED:
        _without_group(d)
        return d.step()
    assert view is not None, f"{job.id}: attempt {attempt.number} was not looked at"
    if job.state.final and attempt.state is not AttemptState.REMOVING:
        d.attempt_is(AttemptState.REMOVING)
    if d.attempt.state is AttemptState.REMOVING:
        _removing(d, view, removed, problem)
        return d.step()
    report = _news(view, attempt)
    stale = view.presence is Presence.PRESENT and report is None  # a new coordinator that has not found its agents yet shows nothing
    seen = Seen(Presence.SILENT if stale else view.presence, report, roots)
    _reachability(d, seen.presence)
    if report is not None:
        learn(d, report)
    for rule in RULES:
        if rule(d, seen):
            break
    return d.step()


def place(job: Job, attempt: Attempt | None, placement: Placement, now: float, roots: Roots) -> JobStep:
    """A new attempt of a waiting job on the nodes that were found for it."""
    d = Decision(job, attempt, now)
    resources = job.spec.resources
    new = Attempt(
        job_id=job.id,
        number=job.attempt + 1,
        state=AttemptState.PLANNED,
        nodes=placement.nodes,
        cpus_per_node=resources.cpus_per_node,
        gpus_per_node=resources.gpus_per_node,
        memory_gb=resources.memory_gb,
        created_at=now,
        first_generation=job.generation + 1,
        generation=job.generation,
        prior_best_step=job.best_step,
    )
    d.new_attempt(new)
    names = ", ".join(node.node_id[:8] for node in placement.nodes)
    d.job_is(JobState.STARTING, Reason.PLACED, f"attempt {new.number} is being started on {names}", attempt=new.number)
    d.do(CreateGroup(group_spec(d.job, new, roots)))
    return d.step()


def wait(job: Job, attempt: Attempt | None, waiting: Waiting, now: float) -> JobStep:
    """A job that stays in the queue, with the reason why."""
    d = Decision(job, attempt, now)
    d.job_is(JobState.PENDING, waiting.reason, waiting.message)
    if (limit := _run_limit(job)) is not None:
        d.look_again(limit)
    return d.step()


def taken_down(job: Job, attempt: Attempt | None, now: float) -> JobStep | None:
    """A group that is ended with its cluster because somebody wants it so: no failure, and no budget pays. None: nothing is to be told."""
    if attempt is None or attempt.state is not AttemptState.ACTIVE or job.desired is not Desired.RUN:
        return None
    d = Decision(job, attempt, now)
    text = "its cluster is ended by `keepstep down`; it goes on after the next `keepstep up`"
    d.attempt_is(AttemptState.REMOVING, outcome=Outcome.LOST, reason=str(Reason.TAKEN_DOWN), message=text, ended_at=now)
    d.job_is(JobState.RECOVERING, Reason.TAKEN_DOWN, text)
    d.learn(saving=None)
    return d.step()


def _without_group(d: Decision) -> None:
    limit = _run_limit(d.job)
    if d.job.state.final:
        return
    if d.job.desired is Desired.CANCEL:
        d.job_is(JobState.CANCELLED, Reason.CANCELLED, "cancelled while it waited; nothing of it runs", ended_at=d.now)
    elif limit is not None and d.now >= limit:
        d.job_is(JobState.FAILED, Reason.RUN_TIMEOUT, _run_timeout_text(d.job), ended_at=d.now)


def _news(view: GroupView, attempt: Attempt) -> GroupReport | None:
    """The report, unless a newer one is known. An outcome is never taken back, so it is news whatever its version."""
    report = view.report
    return report if report is not None and (report.version >= attempt.report_version or report.outcome is not None) else None


def _reachability(d: Decision, presence: Presence) -> None:
    """Tells of a group that cannot be seen; nothing else follows from that."""
    if presence is not Presence.ABSENT and d.attempt.absent_since is not None:
        d.learn_attempt(absent_since=None)
    if presence is Presence.PRESENT:
        if d.job.reason == Reason.UNREACHABLE:
            d.tell("Reachable", "the group answers again")
        d.learn(unreachable_since=None)
    if presence in (Presence.PRESENT, Presence.ABSENT) or d.attempt.state is AttemptState.PLANNED:
        return
    since = d.job.unreachable_since if d.job.unreachable_since is not None else d.now
    d.learn(unreachable_since=since)
    if d.now - since < UNREACHABLE_S:
        d.look_again(since + UNREACHABLE_S)
    else:
        text = f"unreachable, last seen {datetime.fromtimestamp(since, UTC):%Y-%m-%dT%H:%M:%SZ}; it is left alone"
        d.job_is(d.job.state, Reason.UNREACHABLE, text)


# Rules for a live attempt, first match wins. Each returns True when it has decided.


def _ended(d: Decision, seen: Seen) -> bool:
    report = seen.report
    if report is None or report.outcome is None:
        return False
    ended_at = report.ended_at or d.now
    asked = d.job.state is JobState.CANCELLING or d.job.desired is Desired.CANCEL or d.attempt.reason == Reason.RUN_TIMEOUT
    if report.outcome is Outcome.LOST or (report.outcome is Outcome.STOPPED and not asked):
        told = any(incident.recovered_at is None for incident in report.incidents)
        lose(d, report.reason, report.message, ended_at, told=told)
    else:
        timed_out = d.attempt.reason == Reason.RUN_TIMEOUT and report.outcome is not Outcome.SUCCEEDED
        reason, message = (Reason.RUN_TIMEOUT, d.attempt.message) if timed_out else (report.reason, report.message)
        _remove(d, outcome=report.outcome, reason=str(reason), message=message, ended_at=ended_at)
    return True


def _cancel(d: Decision, seen: Seen) -> bool:
    if d.job.desired is not Desired.CANCEL:
        return False
    d.job_is(JobState.CANCELLING, Reason.CANCEL_REQUESTED, "cancel was requested; its ranks are being ended")
    if d.attempt.state is AttemptState.PLANNED and seen.presence is Presence.ABSENT:
        _remove(d)
    else:
        grace = d.job.grace_s if d.job.grace_s is not None else d.job.spec.timeouts.grace_s
        _end(d, seen, grace)
    return True


def _run_timeout(d: Decision, seen: Seen) -> bool:
    limit = _run_limit(d.job)
    if limit is None:
        return False
    if d.now < limit:
        d.look_again(limit)
        return False
    if d.attempt.reason != Reason.RUN_TIMEOUT:
        d.tell(Reason.RUN_TIMEOUT, _run_timeout_text(d.job))
        d.learn_attempt(reason=str(Reason.RUN_TIMEOUT), message=_run_timeout_text(d.job))
    _end(d, seen, d.job.spec.timeouts.grace_s)
    return True


def _gone(d: Decision, seen: Seen) -> bool:
    if seen.presence is not Presence.ABSENT or d.attempt.state is not AttemptState.ACTIVE:
        return False
    if _confirmed_absent(d):
        lose(d, Reason.GROUP_LOST, "Ray no longer knows the group: its coordinator and placement group are gone", d.now)
    return True


def _never_started(d: Decision, seen: Seen) -> bool:
    getting_ready = d.attempt.state is AttemptState.PLANNED or (
        seen.report is not None and seen.report.phase in (GroupPhase.PLACING, GroupPhase.WARMING) and d.attempt.started_at is None
    )
    if not getting_ready or seen.presence is Presence.UNKNOWN:
        return False
    start_s = d.job.spec.timeouts.start_s
    deadline = d.attempt.created_at + start_s + START_MARGIN_S
    if d.now < deadline:
        d.look_again(deadline)
        return False
    told = f": {seen.report.message}" if seen.report is not None else ""
    lose(d, Reason.START_TIMEOUT, f"the group was not ready within {start_s:g} s{told}", d.now)
    return True


def _make(d: Decision, seen: Seen) -> bool:
    if d.attempt.state is not AttemptState.PLANNED or seen.presence not in (Presence.ABSENT, Presence.SILENT):
        return False
    d.do(CreateGroup(group_spec(d.job, d.attempt, seen.roots)))
    return True


def _follow(d: Decision, seen: Seen) -> bool:
    if seen.report is None:
        return False
    shown = STATE_OF_PHASE[seen.report.phase]
    if shown is None:
        return True
    state, reason, text = shown
    if state is JobState.STARTING and d.job.state in (JobState.RUNNING, JobState.RECOVERING):
        state, reason, text = JobState.RECOVERING, Reason.RECOVERING, "a new coordinator collects its agents"
    if state is JobState.RECOVERING and seen.report.incidents:
        text = seen.report.incidents[-1].message
    d.job_is(state, reason, seen.report.message or text)
    return True


RULES: tuple[Callable[[Decision, Seen], bool], ...] = (_ended, _cancel, _run_timeout, _gone, _never_started, _make, _follow)


def _end(d: Decision, seen: Seen, grace_s: float) -> None:
    """Asks the group to end, again on every look, until its outcome is known or its time is over."""
    if d.attempt.state is not AttemptState.ENDING:
        d.attempt_is(AttemptState.ENDING, ending_since=d.now)
    assert d.attempt.ending_since is not None
    deadline = d.attempt.ending_since + grace_s + END_MARGIN_S
    if d.now >= deadline or (seen.presence is Presence.ABSENT and _confirmed_absent(d)):
        _remove(d)
        return
    d.do(EndGroup(d.job.id, d.attempt.number, grace_s))
    d.look_again(deadline)


def _confirmed_absent(d: Decision) -> bool:
    since = d.attempt.absent_since
    if since is None:
        since = d.now
        d.learn_attempt(absent_since=since)
    if d.now - since < ABSENT_S:
        d.look_again(since + ABSENT_S)
        return False
    return True


def _remove(d: Decision, outcome: Outcome | None = None, **facts: object) -> None:
    d.attempt_is(AttemptState.REMOVING, outcome=outcome, **{"ended_at": d.now, **facts})
    d.do(RemoveGroup(d.job.id, d.attempt.number))


def _removing(d: Decision, view: GroupView, removed: bool, problem: str | None) -> None:
    unsettled = d.attempt.outcome not in (Outcome.SUCCEEDED, Outcome.FAILED)
    cancelled_late = d.job.desired is Desired.CANCEL and unsettled and not d.job.state.final and d.job.state is not JobState.CANCELLING
    if cancelled_late:
        d.job_is(JobState.CANCELLING, Reason.CANCEL_REQUESTED, "cancel was requested; its resources are being removed")
    if cancelled_late or not (removed and view.presence is Presence.ABSENT):
        d.do(RemoveGroup(d.job.id, d.attempt.number))
        if problem is not None and not d.job.state.final:  # the state stays, for nothing has ended while something may run
            d.job_is(d.job.state, Reason.NOT_REMOVED, f"attempt {d.attempt.number} cannot be removed yet: {problem}; it is tried again")
        return
    d.attempt_is(AttemptState.ENDED)
    if not d.job.state.final:
        _settle(d)


def _settle(d: Decision) -> None:
    """The job's next state, now that nothing is left of its attempt."""
    job, attempt = d.job, d.attempt
    if attempt.outcome is Outcome.SUCCEEDED:
        d.job_is(JobState.SUCCEEDED, Reason.COMPLETED, attempt.message, ended_at=attempt.ended_at)
    elif job.state is JobState.CANCELLING:
        d.job_is(JobState.CANCELLED, Reason.CANCELLED, "cancelled; nothing of it runs", ended_at=d.now)
    elif attempt.outcome is Outcome.FAILED or attempt.reason == Reason.RUN_TIMEOUT:
        d.job_is(JobState.FAILED, attempt.reason, attempt.message, ended_at=attempt.ended_at)
    elif (verdict := give_up(job, attempt, d.now)) is not None:
        d.job_is(JobState.FAILED, *verdict, ended_at=attempt.ended_at)
    else:
        d.job_is(JobState.PENDING, Reason.GROUP_LOST, f"waits for another placement; attempt {attempt.number}: {attempt.message}")
    d.learn(unreachable_since=None)


def _run_limit(job: Job) -> float | None:
    hours = job.spec.timeouts.run_hours
    return None if hours is None or job.started_at is None else job.started_at + hours * HOUR


def _run_timeout_text(job: Job) -> str:
    return f"ran longer than timeouts.run_hours = {job.spec.timeouts.run_hours:g}"


def waiting_since(job: Job, attempt: Attempt | None) -> float:
    """Since when a PENDING job waits for room (Unix seconds)."""
    return job.created_at if attempt is None or attempt.ended_at is None else max(job.created_at, attempt.ended_at)
