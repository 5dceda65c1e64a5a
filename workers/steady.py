"""A clock that only grows, for whoever decides by deadlines: a wall clock that is set moves none of them.

It tells the Unix time as it was when the clock was made, plus the seconds since, those of a suspended machine included.
"""

from __future__ import annotations

import time


class SteadyClock:
    def __init__(self) -> None:
        self._start = time.time() - _elapsed()

    def now(self) -> float:
        """Unix time in seconds."""
        return self._start + _elapsed()

    def reach(self, at: float) -> None:
        """From now on it is not before ``at``, which another such clock told."""
        self._start += max(0.0, at - self.now())


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
