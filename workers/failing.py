"""PURE: what follows from a failure: its verdict goes into the budget and an incident, then a new generation or the end.

Invariant: every failure has an incident, and the incident says what follows.
"""

from __future__ import annotations

from dataclasses import replace

from workers.budget import charge
from workers.ending import close_group, lose_group
from workers.group import REPEAT_S, AgentSeen, Decision, Doing, Group, Recovery, Seen, StopRanks, gone_agents
from workers.incidents import STOP, new_incident, put, turned
from workers.messages import FailureClass, Outcome
from workers.verdict import Verdict

LAUNCH_S = 60.0


def start_problem(seen: Seen, now: float) -> Verdict | None:
    """Why some node cannot be made ready. Another node may do better, unless the code is at fault, or an environment that fails on each
    of several nodes."""
    told = [(a.index, a.status) for a in seen.agents if a.status and a.status.problem]
    if not told:
        return None
    index, status = next(((i, s) for i, s in told if s.problem_kind == FailureClass.USER), told[0])
    everywhere = 1 < len(told) == len(seen.agents) and all(s.problem_kind == FailureClass.UNKNOWN for _, s in told)
    users = status.problem_kind == FailureClass.USER or everywhere
    kind = FailureClass.USER if users else FailureClass.INFRASTRUCTURE
    evidence = f"node {index} cannot start the command: {status.problem}"
    return Verdict(kind, "cannot_start", None, evidence, f"cannot_start {status.problem}", now)


def start_timeout(group: Group, now: float) -> Verdict:
    evidence = f"nodes were not ready within start_s = {group.spec.start_s:.0f} s"
    return Verdict(FailureClass.INFRASTRUCTURE, "start_timeout", None, evidence, "start_timeout", now)


def unready(seen: Seen) -> list[AgentSeen]:
    """Nodes that have a problem; where none tells one, those that are not warm."""
    problems = [a for a in seen.agents if a.status and a.status.problem]
    return problems or [a for a in seen.agents if not (a.status and a.status.ready)]


def launch_timeout(now: float) -> Verdict:
    evidence = f"not every agent launched its ranks within {LAUNCH_S:.0f} s"
    return Verdict(FailureClass.INFRASTRUCTURE, "launch_timeout", None, evidence, "launch_timeout", now)


def changed_agent(group: Group, seen: Seen, now: float) -> AgentSeen | None:
    """The first agent that is gone or is another process than the one that launched this generation."""
    gone = gone_agents(seen, now)
    if gone:
        return gone[0]
    return next((a for a in seen.agents if a.status and a.status.incarnation != group.incarnations.get(a.index)), None)


def node_of(group: Group, index: int) -> str:
    return group.spec.nodes[index].node_id


def agent_verdict(group: Group, agent: AgentSeen, now: float) -> Verdict:
    evidence = f"the agent of node {agent.index} ({node_of(group, agent.index)[:12]}) is gone, its ranks with it"
    at = min(agent.missing_since or now, now)
    if agent.node_lost:
        evidence = f"node {agent.index} ({node_of(group, agent.index)[:12]}) has left the cluster, its ranks with it"
        return Verdict(FailureClass.INFRASTRUCTURE, "node_lost", None, evidence, f"node_lost {agent.index}", at)
    # A killed drill is known from the status that the agent left last.
    drill = next((r.drill for r in (agent.status.ranks if agent.status else ()) if r.drill), None)
    return Verdict(FailureClass.INFRASTRUCTURE, "agent_lost", None, evidence, f"agent_lost {agent.index}", at, drill=drill)


def fail(group: Group, seen: Seen, now: float, verdict: Verdict) -> Decision:
    """Judge against budgets: a new generation, or the end."""
    group, stop_reason = charge(group, now, verdict)
    node = _blamed_node(group, seen, verdict, now)
    incident = new_incident(group, verdict, node, now, stop_reason[1] if stop_reason else None)
    group = put(group, incident).say(now, "Failure", incident.message, verdict.rank)
    if stop_reason:
        return close_group(group, now, Outcome.FAILED, *stop_reason)
    poisoned = [r.nonfinite_since for r in group.ranks if r.nonfinite_since is not None and r.generation == group.generation]
    if poisoned and verdict.kind == FailureClass.USER:  # no other failure is a reason to give up finished steps
        group = replace(group, roll_back=min(poisoned))
    group = replace(group.go(Doing.STOPPING, now), recovery=Recovery(incident, now), training=False, stacks_asked_at=None)
    return Decision(group, (StopRanks(group.generation),), "Failure", now + REPEAT_S)


def _blamed_node(group: Group, seen: Seen, verdict: Verdict, now: float) -> str | None:
    if verdict.rank is not None:
        return next((r.node_id for r in group.ranks if r.rank == verdict.rank), None)
    away = changed_agent(group, seen, now)
    return node_of(group, away.index) if away and verdict.cause in ("agent_lost", "node_lost") else None


def not_ready(group: Group, seen: Seen, now: float, verdict: Verdict) -> Decision:
    """The nodes cannot be made ready. In the middle of a recovery that is one more turn of the incident that began it."""
    if verdict.kind != FailureClass.USER:
        unfit = unready(seen)
        node = node_of(group, unfit[0].index) if len(unfit) == 1 or len(unfit) < len(seen.agents) else None
        if group.recovery is not None and node is not None:  # whatever it began with, the next placement is to take this node last
            group = replace(group, recovery=replace(group.recovery, incident=replace(group.recovery.incident, blamed_node=node)))
        return lose_for(group, now, verdict, node, _LOST_FOR[verdict.cause], verdict.evidence)
    if group.recovery is not None:
        incident = turned(group.recovery.incident, STOP, f"then {verdict.evidence}; job stops")
    else:
        incident = new_incident(group, verdict, None, now, verdict.evidence)
    group = put(group, incident).say(now, "Failure", incident.message)
    return close_group(group, now, Outcome.FAILED, "UserError", verdict.evidence)


_LOST_FOR = {"cannot_start": "CannotStart", "start_timeout": "StartTimeout"}


def lose_for(group: Group, now: float, verdict: Verdict, node: str | None, reason: str, message: str) -> Decision:
    """Lost between generations. Where nothing failed before, this is the failure, or the coordinator that knew more is gone too."""
    if group.recovery is None:
        group, _ = charge(group, now, verdict)
        group = replace(group, recovery=Recovery(new_incident(group, verdict, node, now, None), now))
    return lose_group(group, now, reason, message)
