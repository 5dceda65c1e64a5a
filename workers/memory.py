"""What the kernel tells of processes that it killed for want of memory: counters of the rank's own cgroup, and of the machine.

Invariant: a counter is read while the rank lives and compared after its end, so a kill from before this rank is never counted. The count of
the rank's own cgroup is proof; that of the machine, which counts all its kills, is the weaker evidence and named as such.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from workers import cgroups
from workers.cgroups import counter, memory_groups

VMSTAT = Path("/proc/vmstat")
_NO_LIMIT = 1 << 60  # cgroup v1 tells "none" as a very large number


@dataclass(frozen=True)
class MemoryWatch:
    """Counters as they were while the rank lived. ``folder``: its memory cgroup, None where there is none to be seen."""

    folder: Path | None
    kills: int
    machine_kills: int


def watch(pid: int, known: MemoryWatch | None) -> MemoryWatch | None:
    """The watch of a living process; ``known`` stays as long as the process stays in its cgroup. None when the process is gone."""
    folder = memory_folder(pid)
    if folder is None and not Path(f"/proc/{pid}").exists():
        return known
    if known is not None and known.folder == folder:
        return known
    machine = known.machine_kills if known is not None else _machine_kills()
    return MemoryWatch(folder, _kills(folder), machine)


def oom_killed(before: MemoryWatch | None) -> str | None:
    """How it is known that the kernel killed for memory since ``before``, as a part of a sentence; None where it did not."""
    if before is None:
        return None
    if before.folder is not None and _kills(before.folder) > before.kills:
        limit = memory_limit(before.folder)
        told = f"its memory limit is {limit / 2**20:.0f} MiB" if limit is not None else "it has no memory limit of its own"
        return f"the kernel counted an out-of-memory kill in its cgroup {before.folder}, {told}"
    if _machine_kills() > before.machine_kills:
        return "the kernel counted an out-of-memory kill on this machine at that time"
    return None


def memory_limit(folder: Path) -> int | None:
    """The lowest limit in bytes of a cgroup and those above it."""
    limits = []
    while folder not in (cgroups.ROOT, cgroups.ROOT.parent):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
        folder = folder.parent
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def memory_folder(pid: int) -> Path | None:
    """The nearest group above a process that counts kills."""
    counted = (f for f in memory_groups(pid) if (f / "memory.oom_control").exists() or (f / "memory.events").exists())
    return next(counted, None)


def _kills(folder: Path | None) -> int:
    return 0 if folder is None else max(counter(folder / name, "oom_kill") for name in ("memory.events", "memory.oom_control"))


def _machine_kills() -> int:
    return counter(VMSTAT, "oom_kill")
