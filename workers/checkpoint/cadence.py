"""How often to take a snapshot, from what it costs. PURE.

``auto`` keeps the stall under 1 % of the training time with the smallest power of two of steps. The ranks of a group must take the same
steps, else no step may be complete on all of them; so the interval is decided by rank 0 at rare, known steps (see workers.agreement).
"""

from __future__ import annotations

from collections import deque
from statistics import median

SHARE = 0.01  # of the step time that snapshots may take
RELAX = 0.7  # a shorter interval must fit with this margin, so that the interval does not flap
WINDOW = 64  # steps remembered
FIRST_DECISION = 8
DECISIONS_APART = 64


class Cadence:
    """Interval of snapshots in steps. ``every`` is fixed when given, else decided from what is observed; times in seconds."""

    def __init__(self, every: int | None) -> None:
        self.every = every or 1
        self.auto = every is None
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._stalls: deque[float] = deque(maxlen=WINDOW // 4)

    def observe_step(self, seconds: float) -> None:
        """One step, without the stall of a snapshot."""
        self._steps.append(seconds)

    def observe_stall(self, seconds: float) -> None:
        self._stalls.append(seconds)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def decide(self) -> int:
        """The interval that fits what was seen: the present one where nothing was seen, or a shorter one has no margin."""
        if not self.auto or not self._steps or not self._stalls:
            return self.every
        stall, allowed = median(self._stalls), median(self._steps) * SHARE
        relaxed = smallest_interval(stall, allowed * RELAX)
        return max(smallest_interval(stall, allowed), min(relaxed, self.every))


def smallest_interval(stall: float, allowed: float) -> int:
    """The smallest power of two N with stall / N below ``allowed`` seconds; at most 2**20."""
    every = 1
    while stall > every * allowed and every < 1 << 20:
        every *= 2
    return every


def decision_at(step: int) -> bool:
    """True at the steps where the interval is decided: early ones at 8, 16, 32, then each 64."""
    return step % DECISIONS_APART == 0 or (FIRST_DECISION <= step < DECISIONS_APART and step & (step - 1) == 0)
