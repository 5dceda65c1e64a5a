"""Signs of life of one rank, with ages by this machine's monotonic clock: nobody's wall clock, set or unequal, can make a rank look dead.

Steps and announced phases are the signs of a script that reports them; for others, where the job asks for it, log output and CPU time of
the rank's processes. The counters that tell an out-of-memory kill are kept beside them: they too must be read while the rank lives.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

from workers.memory import MemoryWatch, oom_killed, watch
from workers.processes import below

LOOK_S = 0.2  # between two looks at the processes; they cost some files of /proc each
CPU_SHARE = 0.02  # of one core: less than this is what idle threads use
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Signs:
    """``shown`` is whatever the rank showed last, ``printed`` how much it has printed; only changes matter."""

    shown: object = None
    shown_at: float = field(default_factory=time.monotonic)
    printed: object = None
    busy_at: float = field(default_factory=time.monotonic)
    _cpu: float = 0.0
    _cpu_at: float = field(default_factory=time.monotonic)
    _looked_at: float = 0.0
    memory: MemoryWatch | None = None

    def show(self, what: object) -> None:
        if what != self.shown:
            self.shown, self.shown_at = what, time.monotonic()

    def look(self, pid: int, printed: object, activity: bool) -> None:
        """Called often while the process lives. ``activity``: output and CPU time are asked for."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self.memory = watch(pid, self.memory)
        if not activity:
            return
        if printed != self.printed:
            self.printed, self.busy_at = printed, now
        if now - self._cpu_at >= 1.0:
            used = cpu_seconds(pid)
            # A child that ended took its time along: less than before is a change too.
            if used < self._cpu or used - self._cpu > CPU_SHARE * (now - self._cpu_at):
                self.busy_at = now
            self._cpu, self._cpu_at = used, now

    def oom_killed(self) -> str | None:
        return oom_killed(self.memory)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.shown_at

    @property
    def quiet_s(self) -> float:
        return time.monotonic() - self.busy_at


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and those below it have used, seconds."""
    total = 0.0
    for one in (pid, *below(pid)):
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{one}/stat", "rb") as file:
            words = file.read().rsplit(b")", 1)[1].split()
            total += (int(words[11]) + int(words[12])) / _TICKS
    return total
