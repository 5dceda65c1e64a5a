"""Short ways to write down groups, agents and ranks: two nodes with one rank each, generation 3, step 40 reached, unless told otherwise.

This folder has no ``__init__.py``: as a package on the path of the tests it would hide the real ``workers``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.group import (
    AGENT_RETURN_S,
    AgentSeen,
    Decision,
    Doing,
    EndRequest,
    Group,
    Launch,
    Recovery,
    SaveFinal,
    Seen,
    StopRanks,
    TerminateRanks,
    new_group,
)
from workers.messages import (
    AgentStatus,
    CheckpointFound,
    CheckpointRecord,
    ErrorReport,
    FailureClass,
    GroupSpec,
    Holding,
    Incident,
    LaunchOrder,
    NodePlace,
    Problem,
    ProcessStack,
    RankPhase,
    RankReport,
    RankStacks,
    RankState,
    RestoreOrder,
    Source,
    Unfit,
)

NOW = 1_800_000_000.0
GENERATION = 3
END = EndRequest(NOW - 1, 30.0)
NOTHING = RestoreOrder(Source.NONE, 0)
PEER_GONE = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711"


def spec(nodes: int = 2, **changes: Any) -> GroupSpec:
    fields: dict[str, Any] = {
        "job_id": "job-x",
        "attempt": 1,
        "framework": "pytorch",
        "strategy": "ddp",
        "command": ("python", "train.py"),
        "env": {},
        "nodes": tuple(NodePlace(i, f"n{i}") for i in range(nodes)),
        "processes_per_node": 1,
        "cpus_per_node": 1,
        "gpus_per_node": 0,
        "memory_gb": 2,
        "devices_per_node": None,
        "bundle_url": None,
        "storage_url": "/storage/job-x",
        "every_steps": None,
        "every_seconds": None,
        "keep_last": 3,
        "snapshot_every_steps": None,
        "max_user_errors": 0,
        "max_infrastructure": 20,
        "window_s": 86_400.0,
        "start_s": 600.0,
        "hang_s": None,
    }
    return GroupSpec(**fields | changes)


def group(doing: Doing, since: float = NOW - 10, **changes: Any) -> Group:
    """In generation 3; ``given`` replaces the spec."""
    fields: dict[str, Any] = {"generation": GENERATION, "incarnations": {0: "i0", 1: "i1"}, "attached": True, "best_step": 40, **changes}
    given = fields.pop("given", None) or spec()
    return replace(new_group(given, since), doing=doing, **fields)


def rank(number: int, **changes: Any) -> RankReport:
    """It runs, with step 40 finished 0.1 s ago."""
    fields: dict[str, Any] = {
        "generation": GENERATION,
        "pid": 100 + number,
        "state": RankState.RUNNING,
        "phase": RankPhase.STEP,
        "step": 40,
        "step_at": NOW - 0.1,
        "step_slowest": 0.5,
        "started_at": NOW - 20,
        "restored_at": NOW - 19.9,
        "new_step_at": NOW - 19.5,
        "attached": True,
    }
    return RankReport(number, number, f"n{number}", 0, **fields | changes)


def ended(number: int, code: int = 0, at: float = NOW - 0.01, **changes: Any) -> RankReport:
    """It ended by itself, or by a signal where ``code`` is negative as waitpid tells it."""
    how = {"signal": -code} if code < 0 else {"exit_code": code}
    return rank(number, state=RankState.EXITED, ended_at=at, **how, **changes)


def silent(number: int, **changes: Any) -> RankReport:
    """A script that reports no steps."""
    plain = {"attached": False, "step": None, "step_at": None, "restored_at": None, "new_step_at": None, "phase": RankPhase.START}
    return rank(number, **plain | changes)


def error(type: str, message: str = "", place: str = "train.py:9 in step") -> ErrorReport:
    return ErrorReport(type, message, f"Traceback\n{type}: {message}", place)


def held(number: int, step: int, valid: bool = True, *, shared: bool = True, own: bool = True) -> Holding:
    return Holding(number, step, GENERATION, 0, False, 8, valid and shared, valid and own)


def status(index: int, *ranks: RankReport, **changes: Any) -> AgentStatus:
    """Of a node on which nothing runs, unless ranks are given."""
    running = any(r.ended_at is None for r in ranks)
    ages = {r.rank: NOW - max(r.step_at or 0.0, r.phase_at or 0.0, r.started_at or 0.0) for r in ranks}
    fields: dict[str, Any] = {
        "incarnation": f"i{index}",
        "version": 1,
        "ready": True,
        "problem": None,
        "generation": GENERATION,
        "stopped": not running,
        "holdings": (),
        "staged": {},
        "pinned": {},
        "metrics": {},
        "silent": ages,
    }
    return AgentStatus(index=index, ranks=ranks, **fields | changes)


def look(*agents: AgentStatus | AgentSeen, **changes: Any) -> Seen:
    return Seen(tuple(a if isinstance(a, AgentSeen) else AgentSeen(a.index, a) for a in agents), **changes)


def ranks_seen(*ranks: RankReport, **changes: Any) -> Seen:
    """One rank per node."""
    return look(*(status(r.node_index, r) for r in ranks), **changes)


def idle(**changes: Any) -> Seen:
    """Both nodes answer and run nothing."""
    each = {name: changes.pop(name) for name in ("ready", "stopped", "staged", "stuck") if name in changes}
    return look(status(0, **each), status(1, **each), **changes)


def with_memory(*steps_of_each: tuple[int, ...], **changes: Any) -> Seen:
    """One tuple of snapshot steps per rank."""
    return look(*(status(i, holdings=tuple(held(i, s) for s in steps)) for i, steps in enumerate(steps_of_each)), **changes)


def unfit(text: str, why: Unfit = Unfit.DAMAGED) -> Problem:
    return Problem(why, text)


def found(step: int, damage: str | None = None, why: Unfit = Unfit.DAMAGED) -> CheckpointFound:
    return CheckpointFound(f"/storage/job-x/checkpoints/{step}", step, unfit(damage, why) if damage else None)


def committed(step: int) -> CheckpointRecord:
    return CheckpointRecord("job-x", 1, GENERATION, step, f"/storage/job-x/checkpoints/{step}", 8, 2, 2, NOW - 60, 0.1)


def recovery(at: float = NOW - 1, decided_at: float = NOW - 0.9, stopped_at: float | None = NOW - 0.8, **changes: Any) -> Recovery:
    fields: dict[str, Any] = {"last_step": 40, "blamed_rank": 1, **changes}
    incident = Incident("job-x", 1, GENERATION - 1, at, "signal", FailureClass.INFRASTRUCTURE, "said", "restart_in_place", **fields)
    return Recovery(incident, decided_at, stopped_at)


def order(restore: RestoreOrder = NOTHING, **changes: Any) -> LaunchOrder:
    fields: dict[str, Any] = {"await_step": 1, "master_address": "10.0.0.1", "master_port": 4000, "agent_store": True, **changes}
    return LaunchOrder(GENERATION, restore, **fields)


def stacks(number: int, *frames: str, place: str | None = None, children: tuple[ProcessStack, ...] = (), state: str = "S") -> RankStacks:
    """Of a rank; frames innermost first."""
    own = ProcessStack(100 + number, state, frames, place or (frames[-1] if frames else None))
    return RankStacks(number, own, children, "\n".join(frames))


def short(decision: Decision) -> tuple[Any, ...]:
    """(doing, actions, reason)"""
    return decision.group.doing, decision.actions, decision.reason


def said(decision: Decision) -> list[str]:
    return [e.reason for e in decision.group.events]


STOP, TERMINATE, SAVE = (StopRanks(GENERATION),), (TerminateRanks(GENERATION),), (SaveFinal(GENERATION),)
TRAINS = group(Doing.TRAINING, training=True, started_at=NOW - 15)
STARTS = group(Doing.TRAINING)
VICTIM = ended(0, 1, NOW - 0.1, error=error("RuntimeError", PEER_GONE))
RAISED = ended(1, 1, error=error("ValueError", "bad sample"))
KILLED = ended(1, -9)
DIED = AgentSeen(1, status(1, rank(1)), NOW - 0.05, died=True)
LEFT = replace(DIED, node_lost=True)
STUCK = status(1, rank(1, ours=True), stuck=(101,))
LATE = NOW - AGENT_RETURN_S - 1
MEMORY_40 = RestoreOrder(Source.MEMORY, 40)
STORAGE_30 = RestoreOrder(Source.STORAGE, 30, found(30).url)
NEXT = GENERATION + 1


def launch(restore: RestoreOrder, await_step: int = 41) -> tuple[Launch]:
    return (Launch(NEXT, restore, await_step),)
