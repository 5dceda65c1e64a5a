"""PURE: what boards and snapshots tell: that a generation trains or is silent, how long its recovery took, what memory holds.

Invariant: all times come from where they happened (the rank's board, the launcher's waitpid), never from when they were heard of.
"""

from __future__ import annotations

from dataclasses import replace

from workers.group import Group, Seen
from workers.messages import RankPhase, RankReport
from workers.verdict import Verdict, judge_hang

EXIT_S = 5.0  # a rank whose script raised gets this long to end by itself
QUIET_S = 1.0  # a script that has not attached this long after its launch reports no steps
HANG_FLOOR_S, HANG_FACTOR = 10.0, 5.0


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


def silence(group: Group, ranks: tuple[RankReport, ...], now: float) -> tuple[Verdict | None, float | None]:
    """A verdict when no rank made a step for too long, and when that would be. Scripts that report no steps are left alone."""
    alive = [r for r in ranks if r.ended_at is None]
    if not alive or not (group.attached or any(r.attached for r in ranks)):
        return None, None
    limit = max(_silence_limit(group, r) for r in alive)
    since = max(max(r.step_at or 0.0, r.phase_at or 0.0, r.started_at or 0.0) for r in ranks)
    if now - since > limit:
        return judge_hang(ranks, now - since, limit), None
    return None, since + limit + 0.05


def _silence_limit(group: Group, rank: RankReport) -> float:
    if rank.step is None or rank.phase in (RankPhase.START, RankPhase.RESTORE, RankPhase.COMPILE, RankPhase.EVAL, RankPhase.SAVE):
        return group.spec.start_s
    if group.spec.hang_s is not None:
        return group.spec.hang_s
    return max(HANG_FLOOR_S, HANG_FACTOR * (rank.step_p99 or 0.0))


def newest_in_memory(group: Group, seen: Seen) -> int | None:
    """Newest step whose snapshot is complete and valid for every rank, each on its own node."""
    held: dict[int, set[int]] = {}
    for agent in seen.agents:
        for h in agent.status.holdings if agent.status else ():
            if h.valid:
                held.setdefault(h.rank, set()).add(h.step)
    if len(held) < group.spec.world_size:
        return None
    return max(set.intersection(*held.values()), default=None)
