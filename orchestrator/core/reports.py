"""How a coordinator's report is taken into job and attempt. PURE.

Invariant: a report that is not newer than the one that was saved changes nothing, unless it holds the outcome, which is the last word;
what only grows (best step, generation, failures) never shrinks, whatever a restarted coordinator remembers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from orchestrator.core.decision import Decision
from orchestrator.core.group_spec import HOUR
from orchestrator.core.model import Event
from orchestrator.core.states import AttemptState, JobState
from workers.messages import Failure, GroupEvent, GroupPhase, GroupReport, Incident

T = TypeVar("T")


def learn(d: Decision, report: GroupReport) -> None:
    """Takes in the facts of a report; the job's state is decided elsewhere."""
    if d.attempt.state is AttemptState.PLANNED:
        d.attempt_is(AttemptState.ACTIVE)
    if report.version <= d.attempt.report_version and report.outcome is None:
        return
    _record_news(d, report)
    generation = max(d.job.generation, report.generation)
    d.learn_attempt(
        report_version=max(d.attempt.report_version, report.version),
        ranks=report.ranks,
        generation=max(d.attempt.generation, report.generation),
        started_at=d.attempt.started_at or report.started_at,
    )
    d.learn(
        step=next((step for step in (report.step, report.resumed_step) if step is not None), d.job.step),
        best_step=newest(d.job.best_step, report.best_step),
        checkpoint_step=newest(d.job.checkpoint_step, max((c.step for c in report.checkpoints), default=None)),
        metrics=report.metrics or d.job.metrics,
        saving=report.saving,
        generation=generation,
        restarts=max(0, generation),
        failures=merged(d.job.failures, report.failures, since=d.now - d.job.spec.restart.window_hours * HOUR),
        started_at=d.job.started_at or report.started_at,
    )
    d.learn(open_incidents=known_open(d.job.open_incidents, report.incidents))
    if report.started_at is not None:
        _close(d, report, report.started_at)


def _record_news(d: Decision, report: GroupReport) -> None:
    """A report tells the whole attempt again; what was saved before is left out, for a report comes every second."""
    seen = d.attempt
    trains_now = report.phase is GroupPhase.RUNNING and (d.job.state is not JobState.RUNNING or report.generation != seen.generation)
    events = [event for event in report.events if event.seq > seen.events_seen]
    checkpoints = _behind(report.checkpoints, [c.committed_at for c in report.checkpoints], seen.checkpoints_seen)
    # An incident changes until a later generation trains, which ends all that were open.
    incidents = [i for i in report.incidents if i.generation >= seen.generation - 1 or trains_now or report.outcome is not None]
    checks = _behind(report.checks, [check.at for check in report.checks], seen.checks_seen)
    told = tuple(_event(d.job.id, report.attempt, event) for event in events)
    d.record(told, tuple(incidents), checkpoints, report.pruned, checks)
    d.learn_attempt(
        events_seen=max([seen.events_seen, *(event.seq for event in events)]),
        checkpoints_seen=checkpoints[-1].committed_at if checkpoints else seen.checkpoints_seen,
        checks_seen=checks[-1].at if checks else seen.checks_seen,
    )


def _behind(records: tuple[T, ...], times: list[float], saved: float | None) -> tuple[T, ...]:
    """Those after the one of the time ``saved``, all where it is not told any more: a time names a record here, for a coordinator that
    another one replaced may have an earlier clock."""
    return records[max((i + 1 for i, at in enumerate(times) if at == saved), default=0) :]


def _event(job_id: str, attempt: int, event: GroupEvent) -> Event:
    return Event(
        job_id=job_id,
        at=event.at,
        reason=event.reason,
        message=event.message,
        source=f"attempt-{attempt}",
        source_seq=event.seq,
        attempt=attempt,
        generation=event.generation,
        rank=event.rank,
    )


def newest(old: int | None, new: int | None) -> int | None:
    """The larger of two steps that may be unknown."""
    return max((step for step in (old, new) if step is not None), default=None)


def merged(old: tuple[Failure, ...], new: tuple[Failure, ...], since: float) -> tuple[Failure, ...]:
    """Failures of both that happened after ``since`` (Unix seconds), each once, oldest first; older ones no budget counts."""
    known = {(failure.at, failure.cause, failure.signature): failure for failure in (*old, *new) if failure.at > since}
    return tuple(sorted(known.values(), key=lambda failure: failure.at))


def known_open(old: tuple[Incident, ...], new: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """What is open of both; the newer word about an incident counts."""
    known = {(i.attempt, i.generation): i for i in (*old, *new)}
    return tuple(i for i in known.values() if i.recovered_at is None)


def _close(d: Decision, report: GroupReport, recovered_at: float) -> None:
    """Failures that cost an attempt, and those that it had not recovered from, ended when the next attempt trained, though that may be over
    when it is heard of."""
    earlier = [i for i in d.job.open_incidents if i.attempt < report.attempt]
    d.record(incidents=tuple(_closed(i, report, recovered_at) for i in earlier))
    d.learn(open_incidents=tuple(i for i in d.job.open_incidents if i not in earlier))


def _closed(incident: Incident, report: GroupReport, recovered_at: float) -> Incident:
    resumed, last = report.resumed_step, incident.last_step
    return replace(
        incident,
        recovered_at=recovered_at,
        recovery_seconds=max(0.0, recovered_at - incident.at),
        resumed_step=resumed,
        lost_steps=None if resumed is None or last is None else max(0, last - resumed),
        restored_from=report.restored_from,
    )
