"""How a coordinator's report is taken into job and attempt. PURE.

Invariant: a report that is not newer than the one that was saved changes nothing, unless it holds the outcome, which is the last word;
what only grows (best step, generation, failures) never shrinks, whatever a restarted coordinator remembers.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.decision import Decision
from orchestrator.core.model import Event
from orchestrator.core.states import AttemptState
from workers.messages import Failure, GroupPhase, GroupReport, Incident


def learn(d: Decision, report: GroupReport) -> None:
    """Takes in the facts of a report; the job's state is decided elsewhere."""
    if d.attempt.state is AttemptState.PLANNED:
        d.attempt_is(AttemptState.ACTIVE)
    if report.version <= d.attempt.report_version and report.outcome is None:
        return
    generation = max(d.job.generation, report.generation)
    d.learn_attempt(
        report_version=max(d.attempt.report_version, report.version),
        ranks=report.ranks,
        generation=max(d.attempt.generation, report.generation),
        started_at=d.attempt.started_at or report.started_at,
    )
    d.learn(
        step=report.step if report.step is not None else d.job.step,
        best_step=newest(d.job.best_step, report.best_step),
        metrics=report.metrics or d.job.metrics,
        generation=generation,
        restarts=max(0, generation),
        failures=merged(d.job.failures, report.failures),
        started_at=d.job.started_at or report.started_at,
    )
    d.record(
        events=tuple(
            Event(
                job_id=d.job.id,
                at=event.at,
                reason=event.reason,
                message=event.message,
                source=f"attempt-{report.attempt}",
                source_seq=event.seq,
                attempt=report.attempt,
                generation=event.generation,
                rank=event.rank,
            )
            for event in report.events
        ),
        incidents=report.incidents,
        checkpoints=report.checkpoints,
        pruned=report.pruned,
    )
    if d.job.open_incident is not None and report.phase is GroupPhase.RUNNING:
        _close(d, d.job.open_incident, report)


def newest(old: int | None, new: int | None) -> int | None:
    """The larger of two steps that may be unknown."""
    return max((step for step in (old, new) if step is not None), default=None)


def merged(old: tuple[Failure, ...], new: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Failures of both, each once, oldest first."""
    known = {(failure.at, failure.cause, failure.signature): failure for failure in (*old, *new)}
    return tuple(sorted(known.values(), key=lambda failure: failure.at))


def _close(d: Decision, incident: Incident, report: GroupReport) -> None:
    """A failure that cost an attempt has ended when the next attempt trains."""
    recovered_at = report.started_at or d.now
    resumed, last = report.resumed_step, incident.last_step
    closed = replace(
        incident,
        recovered_at=recovered_at,
        recovery_seconds=max(0.0, recovered_at - incident.at),
        resumed_step=resumed,
        lost_steps=None if resumed is None or last is None else max(0, last - resumed),
        restored_from=report.restored_from,
    )
    d.record(incidents=(closed,))
    d.learn(open_incident=None)
