"""How much a node can still put into shared memory: what its folder, the machine and the control groups of this process leave.

Invariant: what cannot be read sets no limit.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
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
    """What each control group above this process leaves; in a container its own is the root."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = CGROUPS / "memory" if "memory" in controllers.split(",") else CGROUPS if controllers == "" else None
            if root is not None:
                folder = root / path.strip("/")
                found += [left for f in (folder, *folder.parents) if f.is_relative_to(root) for left in _left(f)]
    return found


def _left(folder: Path) -> list[int]:
    for limit, used, cached in _NAMES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            return [max(0, left + _counter(folder / "memory.stat", cached))]
    return []


def _counter(file: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
