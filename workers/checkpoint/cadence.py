"""How often to take a snapshot, from what it costs. PURE.

``auto`` keeps the stall under 1 % of the training time with the smallest number of steps that does. The ranks of a group must take the
same steps, else no step may be complete on all of them; so the interval is decided by rank 0 at rare, known steps (see workers.agreement).
Ranks that have no store in common decide each for itself: by powers of two, whose steps contain each other's.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SHARE = 0.01  # of the step time that snapshots may take
WINDOW = 64  # steps remembered
FIRST_DECISION = 8
DECISIONS_APART = 64


class Cadence:
    """Interval of snapshots in steps. ``every`` is fixed when given, else decided from what is observed; times in seconds."""

    def __init__(self, every: int | None, agreed: bool = True) -> None:
        self.every = every or 1
        self._agreed = agreed
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
        """The smallest interval that fits what was seen; the present one where nothing was seen."""
        if not self.auto or not self._steps or not self._stalls:
            return self.every
        every = smallest_interval(median(self._stalls), median(self._steps) * SHARE)
        return every if self._agreed else 1 << (every - 1).bit_length()


def smallest_interval(stall: float, allowed: float) -> int:
    """The smallest N with stall / N at most ``allowed`` seconds; at most 2**20."""
    return max(1, min(1 << 20, math.ceil(stall / allowed))) if allowed > 0 else 1 << 20


def decision_at(step: int) -> bool:
    """True at the steps where the interval is decided: early ones at 8, 16, 32, then each 64."""
    return step % DECISIONS_APART == 0 or (FIRST_DECISION <= step < DECISIONS_APART and step & (step - 1) == 0)
