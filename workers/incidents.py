"""PURE: incidents of a group: made at a failure, closed when training goes on, rewritten when the plan for it changes.

Invariant: no incident stays open once a later generation trains.
"""

from __future__ import annotations

from dataclasses import replace

from workers.group import KEPT_INCIDENTS, Group, Recovery
from workers.messages import Incident, RankReport
from workers.verdict import Verdict

IN_PLACE, RELAUNCH, STOP = "restart_in_place", "relaunch", "stop"
_WHAT_FOLLOWS = "all ranks restart in place"


def put(group: Group, incident: Incident) -> Group:
    """One incident per generation."""
    others = tuple(i for i in group.incidents if i.generation != incident.generation)
    return replace(group, incidents=(*others, incident)[-KEPT_INCIDENTS:])


def new_incident(group: Group, verdict: Verdict, node: str | None, now: float, stop_reason: str | None) -> Incident:
    """``last_step`` is the newest step that this generation had finished, or had taken over."""
    at = verdict.at or now
    where = f", on node {node[:12]}" if node is not None and verdict.rank is not None else ""
    follows = f"job stops: {stop_reason}" if stop_reason else _WHAT_FOLLOWS
    steps = [r.step for r in group.ranks if r.step and r.generation == group.generation]
    restored = group.restore.step if group.restore is not None else 0
    return Incident(
        job_id=group.spec.job_id,
        attempt=group.spec.attempt,
        generation=max(group.generation, group.spec.first_generation),
        at=at,
        cause=verdict.cause,
        kind=verdict.kind,
        message=f"{verdict.kind}: {verdict.evidence}{where}; {follows}",
        action=STOP if stop_reason else IN_PLACE,
        blamed_rank=verdict.rank,
        blamed_node=node,
        exit_code=verdict.exit_code,
        signal=verdict.signal,
        excerpt=verdict.excerpt[-8192:],
        stacks=verdict.stacks,
        drill=verdict.drill,
        last_step=max([*steps, restored]) if group.attached else None,
        phases_ms={"detect": round(max(0.0, now - at) * 1000, 3)},
    )


def turned(incident: Incident, action: str, follows: str) -> Incident:
    """The incident when something else follows than was planned."""
    return replace(incident, action=action, message=incident.message.replace(_WHAT_FOLLOWS, follows))


def closed(recovery: Recovery, ranks: tuple[RankReport, ...], now: float) -> Incident:
    """The incident with its phases: each ends where the next begins, so they add up to the recovery time."""
    incident = recovery.incident
    stopped = recovery.stopped_at or recovery.decided_at
    launched = max(r.started_at or now for r in ranks)
    marks = [("detect", incident.at, recovery.decided_at), ("stop", recovery.decided_at, stopped), ("launch", stopped, launched)]
    end = launched
    if all(r.new_step_at is not None for r in ranks):
        restored = max(r.restored_at or launched for r in ranks)
        end = max(r.new_step_at or now for r in ranks)
        marks += [("restore", launched, restored), ("first_step", restored, end)]
    phases = {name: round(max(0.0, to - since) * 1000, 3) for name, since, to in marks}
    return _ended(replace(incident, phases_ms=phases), end)


def now_training(group: Group, ranks: tuple[RankReport, ...], now: float) -> Group:
    """The generation has shown that it trains."""
    if group.first:
        step_said = "first step finished" if group.attached else "the script runs, it has reported no step yet"
        group = replace(group, started_at=now).say(now, "Training", f"generation {group.generation}: {step_said}")
    group, incident = _close_all(group, ranks, now)
    if incident is not None:
        lost = incident.lost_steps
        steps = "" if lost is None else f", {lost} step{'' if lost == 1 else 's'} lost"
        how = f"recovered in {incident.recovery_seconds:.3f} s from {incident.restored_from}"
        if "first_step" not in incident.phases_ms:
            silent = "the script has made no new step" if group.attached else "the script reports no steps"
            how = f"relaunched in {incident.recovery_seconds:.3f} s; {silent}, so when it trained again is not known"
        message = f"{incident.cause}: {how}{steps}"
        group = group.say(now, "Recovered", message, incident.blamed_rank)
    return replace(group, training=True)


def _close_all(group: Group, ranks: tuple[RankReport, ...], now: float) -> tuple[Group, Incident | None]:
    """The group without open incidents, and the one whose recovery has just ended. Earlier ones failed again before a new step."""
    if group.recovery is None:
        return group, None
    newest = closed(group.recovery, ranks, now)
    assert newest.recovered_at is not None
    for incident in group.incidents:
        if incident.recovered_at is None and incident.action == IN_PLACE and incident.generation != newest.generation:
            resumed, last = newest.resumed_step, incident.last_step
            lost = None if resumed is None or last is None else max(0, last - resumed)
            taken = replace(incident, resumed_step=resumed, lost_steps=lost, restored_from=newest.restored_from)
            group = put(group, _ended(taken, newest.recovered_at))
    return replace(put(group, newest), recovery=None), newest


def _ended(incident: Incident, at: float) -> Incident:
    return replace(incident, recovered_at=at, recovery_seconds=round(max(0.0, at - incident.at), 6))
