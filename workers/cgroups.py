"""The control groups that account the memory of a process, of v1 or v2, and the counters in their files.

Invariant: what cannot be read is not there; nothing raises.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_groups(pid: int) -> list[Path]:
    """The process's own first, then those above it. In a container, where paths of the host cannot be seen, its own is the root."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = ROOT / "memory" if "memory" in controllers.split(",") else ROOT if controllers == "" else None
            if root is not None:
                own = root / path.strip("/")
                found += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return found


def counter(file: Path, name: str) -> int:
    """``name`` in a file of names and numbers; 0 where it is not told."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
