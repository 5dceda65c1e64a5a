"""Whether the folders of a rank have room, told by the file system itself: an error number alone may come from elsewhere, or get lost.

Invariant: a file system that does not answer costs at most ANSWER_S.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

ANSWER_S = 0.2
LITTLE = 1 << 20  # bytes; of a small file system a hundredth
FEW = 16  # files


def full(folders: Iterable[str]) -> str | None:
    """Which of these folders has no room left, with the numbers, as a part of a sentence; None: all have some, or did not answer."""
    found: list[str] = []
    asked = threading.Thread(target=lambda: found.extend(filter(None, map(_problem, dict.fromkeys(folders)))), daemon=True)
    asked.start()
    asked.join(ANSWER_S)
    return "; ".join(found) or None


def _problem(folder: str) -> str | None:
    with contextlib.suppress(OSError):
        seen = os.statvfs(folder)
        free, size = seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize
        if size and free < min(LITTLE, size // 100):
            return f"{folder} has {free} bytes free of {size}"
        if seen.f_files and seen.f_favail < FEW:
            return f"{folder} has room for {seen.f_favail} more files of {seen.f_files}"
    return None
