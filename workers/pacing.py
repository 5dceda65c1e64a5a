"""PURE: which step is written to storage, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.checkpoint.interval import auto_interval
from workers.group import Group
from workers.messages import AgentStatus, RankReport

LEAD_S = 1.0  # a requested step lies this far ahead, so that every rank hears of it in time
RETRY_S, RETRY_MAX_S = 10.0, 600.0


def common_pin(statuses: Sequence[AgentStatus], world_size: int) -> tuple[int | None, set[int]]:
    """(step that every rank has pinned, steps that some rank pinned and others have passed by)."""
    pins = {rank: step for s in statuses for rank, step in s.pinned.items()}
    if not pins:
        return None, set()
    newest = max(pins.values())
    ready = len(pins) == world_size and set(pins.values()) == {newest}
    passed = {rank.rank for s in statuses for rank in s.ranks if rank.rank not in pins and (rank.step or 0) > newest + 1}
    stale = {step for step in pins.values() if step < newest} | ({newest} if passed and not ready else set())
    return (newest if ready else None), stale


def step_to_ask(group: Group, ranks: Sequence[RankReport], asked: tuple[int, int], now: float) -> int | None:
    """By time: the step to ask the ranks for, far enough ahead that none has passed it when it hears of it; None: not now. ``asked``:
    (generation, step) of the request before."""
    every = interval(group, now)
    steps = [r.step for r in ranks if r.step]
    if every is None or not steps or len(steps) < group.spec.world_size:
        return None
    begun = group.started_at or max(r.first_step_at or now for r in ranks)
    last = group.checkpoints[-1].committed_at if group.checkpoints else begun
    if now - last < every or (asked[0] == group.generation and min(steps) <= asked[1]):
        return None
    seconds = max(1e-3, max(r.step_seconds or 1.0 for r in ranks))
    return max(steps) + max(2, math.ceil(LEAD_S / seconds))


def pause(failures: int) -> float:
    """Seconds that pass before the next checkpoint is tried, after so many that failed one after the other."""
    return min(RETRY_S * 2.0 ** (min(failures, 10) - 1), RETRY_MAX_S) if failures else 0.0


def interval(group: Group, now: float) -> float | None:
    """Seconds from one checkpoint to the next request; None: none is taken by time."""
    fixed = group.spec.every_seconds
    if not group.spec.auto_checkpoints:
        return fixed
    failures = [f for f in group.failures if f.at > now - group.spec.window_s]
    begun = min([f.at for f in failures] + [group.started_at if group.started_at is not None else now])
    auto = auto_interval([c.write_seconds for c in group.checkpoints], now - begun, len(failures))
    return auto if fixed is None else min(auto, fixed)
