"""Reads what ranks wrote: ``<job folder>/logs/a<attempt>/g<generation>/rank-<rank>.log``, raw bytes.

``rank-<r>.log`` is the newest part; ``rank-<r>.log.1``, ``.2`` ... are older ones that rotation moved away. Invariants: a position stays
valid when its part is renamed by rotation; every read is bounded; paths are made of integers only, so none can leave the job's folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fsspec

ATTEMPT = re.compile(r"a(\d{1,9})")
GENERATION = re.compile(r"g(\d{1,9})")
PART = re.compile(r"rank-(\d{1,6})\.log(?:\.(\d{1,6}))?")
TAIL_BLOCK = 64 * 1024
LONGEST_LINE = 64 * 1024  # bytes; longer lines are shown in pieces


@dataclass(frozen=True)
class Part:
    """One file of a rank's log. ``ident`` follows the file through a rename where the storage can tell."""

    path: str
    size: int
    ident: str


@dataclass(frozen=True)
class Position:
    """Where a reader stands: in the part ``ident``, behind ``offset`` bytes."""

    ident: str
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Bytes as they follow a position; they may span several parts. ``skipped``: rotation removed what came between."""

    spans: tuple[tuple[Position, bytes], ...]
    at_end: bool
    skipped: bool

    @property
    def data(self) -> bytes:
        return b"".join(data for _, data in self.spans)

    def position(self, consumed: int) -> Position:
        """The position behind the first ``consumed`` bytes."""
        for start, data in self.spans:
            if consumed <= len(data):
                return Position(start.ident, start.offset + consumed)
            consumed -= len(data)
        raise ValueError("consumed more than was read")


class LogStore:
    """The logs of one job. Raises OSError when the storage does not answer."""

    def __init__(self, storage_url: str) -> None:
        self._fs, folder = fsspec.url_to_fs(storage_url, use_listings_cache=False)
        self._root = f"{folder.rstrip('/')}/logs"

    def generations(self) -> list[tuple[int, int]]:
        """All (attempt, generation) that have logs, in order."""
        found = []
        for attempt in self._numbers(self._root, ATTEMPT):
            found += [(attempt, generation) for generation in self._numbers(f"{self._root}/a{attempt}", GENERATION)]
        return sorted(found)

    def ranks(self, attempt: int, generation: int) -> dict[int, list[Part]]:
        """Parts of each rank's log, oldest first."""
        numbered: dict[int, list[tuple[int, Part]]] = {}
        for info in self._list(f"{self._root}/a{attempt:d}/g{generation:d}"):
            match = PART.fullmatch(str(info["name"]).rsplit("/", 1)[-1])
            if match and info["type"] == "file":
                part = Part(info["name"], info["size"], str(info.get("ino") or f"n{match[2] or 0}"))
                numbered.setdefault(int(match[1]), []).append((int(match[2] or 0), part))
        return {rank: [part for _, part in sorted(parts, key=lambda p: -p[0])] for rank, parts in sorted(numbered.items())}

    def read(self, parts: Sequence[Part], after: Position | None, limit: int) -> Chunk:
        """At most ``limit`` bytes that follow ``after``; None: from the beginning."""
        index = 0 if after is None else next((i for i, part in enumerate(parts) if part.ident == after.ident), -1)
        skipped = index < 0
        offset = after.offset if after is not None and not skipped else 0
        spans: list[tuple[Position, bytes]] = []
        for part in parts[max(index, 0) :]:
            if offset > part.size:  # the file was begun anew under the same identity
                offset, skipped = 0, True
            data = self._slice(part, offset, min(limit, part.size - offset))
            spans.append((Position(part.ident, offset), data))
            limit -= len(data)
            if limit <= 0 and not (part is parts[-1] and offset + len(data) >= part.size):
                return Chunk(tuple(spans), at_end=False, skipped=skipped)
            offset = 0
        return Chunk(tuple(spans), at_end=True, skipped=skipped)

    def tail(self, parts: Sequence[Part], lines: int, limit: int) -> Position | None:
        """Where the newest ``lines`` lines begin, at most ``limit`` bytes before the end; None: there is no byte."""
        if lines == 0:
            return Position(parts[-1].ident, parts[-1].size) if parts else None
        found, position = 0, None
        for part in reversed(parts):
            end = part.size
            while end > 0:
                start = max(0, end - min(TAIL_BLOCK, limit))
                block = self._slice(part, start, end - start)
                at = len(block)
                # The newline that ends the very last line does not begin another.
                if position is None and block.endswith(b"\n"):
                    at -= 1
                position = Position(part.ident, start)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    found += 1
                    if found >= lines:
                        return Position(part.ident, start + at + 1)
                limit -= len(block)
                if limit <= 0 or not block:
                    return position
                end = start
        return position

    def _slice(self, part: Part, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        try:
            with self._fs.open(part.path, "rb") as file:
                file.seek(offset)
                return bytes(file.read(length))
        except FileNotFoundError:  # rotated between listing and reading: the next listing tells
            return b""

    def _numbers(self, folder: str, pattern: re.Pattern[str]) -> list[int]:
        names = (str(info["name"]).rstrip("/").rsplit("/", 1)[-1] for info in self._list(folder) if info["type"] == "directory")
        return sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)

    def _list(self, folder: str) -> list[dict[str, Any]]:
        try:
            return list(self._fs.ls(folder, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []


def cut(data: bytes, flush: bool) -> list[bytes]:
    """Whole lines of ``data``; their summed length is what was consumed.

    A line longer than LONGEST_LINE comes in pieces, never cut inside a UTF-8 character. With ``flush`` an unfinished line at the end
    comes too.
    """
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        newline = data.find(b"\n", at, at + LONGEST_LINE)
        if newline >= 0:
            end = newline + 1
        elif len(data) - at >= LONGEST_LINE:
            end = _character_border(data, at + LONGEST_LINE)
        elif flush:
            end = len(data)
        else:
            break
        pieces.append(data[at:end])
        at = end
    return pieces


def _character_border(data: bytes, at: int) -> int:
    """The nearest place at or up to 3 bytes before ``at`` that is not inside a UTF-8 character."""
    for back in range(4):
        if at - back >= len(data) or data[at - back] & 0xC0 != 0x80:
            return at - back
    return at
