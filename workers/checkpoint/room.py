"""How much a node can still put into shared memory: what its folder, the machine and the control groups of this process leave.

Invariant: what cannot be read sets no limit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from workers.cgroups import counter, memory_groups

MEMINFO = Path("/proc/meminfo")
# (limit, used, what the kernel takes back when it needs memory: cached files) of cgroup v2, of v1
_NAMES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(shm: Path) -> int:
    """Bytes that may be added to ``shm`` now. Raises OSError where it does not exist."""
    return min([shutil.disk_usage(shm).free, *_of_machine(), *_of_groups()])


def _of_machine() -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return [int(lines["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in lines else []
    return []


def _of_groups() -> list[int]:
    """What each control group of this process leaves."""
    return [left for folder in memory_groups(os.getpid()) for left in _left(folder)]


def _left(folder: Path) -> list[int]:
    for limit, used, cached in _NAMES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            return [max(0, left + counter(folder / "memory.stat", cached))]
    return []
