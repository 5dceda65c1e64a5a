"""The wall clock, so that everything else can be told what time it is."""

from __future__ import annotations

import time


class SystemClock:
    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()
