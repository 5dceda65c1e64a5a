"""PURE: what boards and snapshots tell: that a generation trains or is silent.

Invariant: all times come from where they happened (the rank's board, the launcher's waitpid), never from when they were heard of; the
coordinator has brought them to its own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.group import Group, Seen
from workers.messages import GroupSpec, RankPhase, RankReport

EXIT_S = 5.0  # a rank whose script raised gets this long to end by itself
QUIET_S = 1.0  # a script that has not attached this long after its launch reports no steps
HANG_FLOOR_S, HANG_FACTOR = 10.0, 5.0
STOPPED = "T"  # of /proc
UNHEARD_S = 1.0  # silence grows by no more than this after an agent's last word: it is the agent then that is silent


def settled(rank: RankReport, now: float) -> RankReport:
    """A rank whose script raised but whose process hangs on its way out counts as ended."""
    if rank.ended_at is None and rank.failed_at is not None and now - rank.failed_at > EXIT_S:
        return replace(rank, exit_code=1, ended_at=rank.failed_at)
    return rank


def training_since(group: Group, ranks: tuple[RankReport, ...], now: float) -> float | None:
    """When the generation counts as training: its first new step, or for a script without steps a quiet moment after the launch."""
    if len(ranks) < group.spec.world_size:
        return None
    new_steps = [r.new_step_at for r in ranks]
    if all(t is not None for t in new_steps):
        return max(t for t in new_steps if t is not None)
    if group.attached or any(r.attached for r in ranks):
        return None
    launched = max(r.started_at or now for r in ranks)
    return launched if group.recovery is not None else launched + QUIET_S


def tell_nonfinite(group: Group, ranks: tuple[RankReport, ...], now: float) -> Group:
    """Once for each metric of a generation."""
    for rank in ranks:
        for name, step in rank.nonfinite:
            if name not in group.nonfinite:
                text = f"metric {name} of rank {rank.rank} is NaN or infinite, first at step {step}"
                group = replace(group, nonfinite=(*group.nonfinite, name)).say(now, "NonFinite", text, rank.rank)
    return group


def silence(group: Group, seen: Seen, ranks: tuple[RankReport, ...], now: float) -> tuple[Silence | None, float | None]:
    """The silence of all ranks when it has lasted too long, and else when it would have. ``ranks``: of the present generation.

    Ages are told by each node's agent, so the clocks of two machines are never compared. Scripts that report no steps are left alone
    unless the job has a ``silence_s``: then neither output nor CPU time is the sign.
    """
    alive = [r for r in ranks if r.ended_at is None]
    reports_steps = group.attached or any(r.attached for r in ranks)
    if not alive or not (reports_steps or group.spec.silence_s):
        return None, None
    limit, phase = max(((_limit(group, r), r.phase) for r in alive), key=lambda found: found[0])
    limit = limit if reports_steps else group.spec.silence_s or 0.0
    stopped = [r.rank for r in alive if r.os_state == STOPPED]
    if stopped and reports_steps:  # whatever phase it is in, nothing of it goes on
        limit = min(limit, max(_between_steps(group, r, HANG_FLOOR_S) for r in alive))
    ages = [
        age + min(max(0.0, now - (agent.heard_at or now)), UNHEARD_S)
        for agent in seen.agents
        if (status := agent.status) is not None and status.generation == group.generation
        for age in (status.silent if reports_steps else status.quiet).values()
    ]
    age = min(ages, default=0.0)
    if age > limit:
        sign = "step" if reports_steps else "log output and no CPU time"
        during = f", phase {phase or RankPhase.STEP}" if reports_steps else ", timeouts.silence_s"
        during = f", rank {stopped[0]} is stopped" if stopped else during
        return Silence(f"no {sign} for {age:.1f} s (limit {limit:.1f} s{during})", now - age), None
    return None, now + limit - age + 0.05


def has_served(group: Group, ranks: tuple[RankReport, ...]) -> bool:
    """No rank will read the staged checkpoint any more: each has restored, goes on without, or has ended."""
    return len(ranks) == group.spec.world_size and all(r.restored_at or r.first_step_at or r.ended_at for r in ranks)


@dataclass(frozen=True)
class Silence:
    said: str
    since: float  # Unix time of the last sign of life


def _limit(group: Group, rank: RankReport) -> float:
    """Seconds of silence that the phase of a rank allows."""
    between_steps = _between_steps(group, rank, group.spec.start_s)
    return PHASE_LIMITS[RankPhase.START if rank.step is None else rank.phase or RankPhase.STEP](group.spec, between_steps)


def _between_steps(group: Group, rank: RankReport, unknown: float) -> float:
    """How long steps take is known after two of them, or from earlier generations; ``unknown``: before."""
    if group.spec.hang_s is not None:
        return group.spec.hang_s
    slowest = rank.step_slowest if rank.step_slowest is not None else group.step_slowest
    return unknown if slowest is None else max(HANG_FLOOR_S, HANG_FACTOR * slowest)


# Each announced phase has a limit of its own: (spec, limit between steps) -> seconds.
PHASE_LIMITS: dict[RankPhase, Callable[[GroupSpec, float], float]] = {
    RankPhase.START: lambda spec, between: spec.start_s,  # until the first step of a generation, which compiles and warms up
    RankPhase.RESTORE: lambda spec, between: spec.start_s,
    RankPhase.COMPILE: lambda spec, between: max(spec.start_s, between),
    RankPhase.EVAL: lambda spec, between: max(spec.start_s, between),
    RankPhase.SAVE: lambda spec, between: max(spec.start_s, between),
    RankPhase.STEP: lambda spec, between: between,
    RankPhase.DONE: lambda spec, between: between,
}
