"""The log of one rank in storage: raw bytes in at most two parts.

Invariants: bytes are appended in their order; a full part becomes the older one, beside it as ``.1``, in place of the one before; how many
bytes went with parts before them stands at the head of the newest; a part that cannot be made leaves the old ones as they are.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PART_BYTES = 64 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class LogParts:
    """Opened at the first write, in storage that may not answer: only a thread that may wait writes here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._stored = 0  # bytes in the newest part
        self._dropped = 0  # bytes of parts that were replaced
        self._heads = [0, 0]  # our own mark at the head of the older and the newest part, in bytes

    def write(self, data: bytes) -> None:
        """Raises OSError; what it had written by then stays."""
        if self._file < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, _FLAGS, 0o644)
        if self._stored and self._stored + len(data) > PART_BYTES:
            self._turn()
        view = memoryview(data)
        while view:
            written = os.write(self._file, view)
            self._stored += written
            view = view[written:]

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):  # an error of a write before; no byte is lost that was not
                os.close(self._file)
            self._file = -1

    def _turn(self) -> None:
        older, fresh = (self._path.with_name(self._path.name + end) for end in (".1", ".new"))
        file = os.open(fresh, _FLAGS | os.O_TRUNC, 0o644)
        try:
            dropped = self._dropped
            with contextlib.suppress(FileNotFoundError):
                dropped += older.stat().st_size - self._heads[0]
            mark = f"[keepstep: {dropped} bytes dropped here]\n".encode() if dropped else b""
            head = os.write(file, mark)
            os.replace(self._path, older)
            os.replace(fresh, self._path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._stored, self._dropped = file, 0, dropped
        self._heads = [self._heads[1], head]
