"""A rank's snapshot slots in shared memory as others see them: the header, and what an agent does with it.

A slot is a file ``snap-<rank>-<slot>``: [4096-byte header][safetensors][meta JSON]. Its writer sets WRITING first and COMPLETE last, so a
process killed in between leaves a slot that nobody takes. Invariants: no framework is imported here; a slot is only ever read when
COMPLETE; the rank writes all fields but ``pinned``, which an agent may clear, and ``state``, which an agent may set to INVALID.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from workers.checkpoint.tree import StateError
from workers.messages import Holding

MAGIC = b"KEEPSNAP"
VERSION = 1
HEADER = 4096
SLOTS = 3

EMPTY, WRITING, COMPLETE, INVALID = range(4)

# magic, version, state, pinned, -, step, generation, sequence, bytes of safetensors, bytes of meta, xxh3 of both
_HEADER = struct.Struct("<8sIIIIQQQQQQ")
AT_STATE = 12
AT_PINNED = 16
_WORD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Header:
    """``body`` and ``meta`` in bytes; ``sequence`` grows with each snapshot of the rank, also over generations."""

    state: int
    pinned: bool
    step: int
    generation: int
    sequence: int
    body: int
    meta: int
    xxh3: int

    @property
    def complete(self) -> bool:
        return self.state == COMPLETE

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC, VERSION, self.state, self.pinned, 0, self.step, self.generation, self.sequence, self.body, self.meta, self.xxh3
        )


NOTHING = Header(EMPTY, False, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class SlotView:
    """A mapped complete slot. ``body`` holds the safetensors bytes, ``meta`` the parsed JSON."""

    header: Header
    body: memoryview
    meta: dict[str, Any]


def slot_path(shm: Path, rank: int, slot: int) -> Path:
    return shm / f"snap-{rank}-{slot}"


def read_header(path: Path) -> Header | None:
    """None when there is no such slot, or it is not one of ours."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return parse_header(os.pread(fd, _HEADER.size, 0))
    finally:
        os.close(fd)


def parse_header(data: bytes) -> Header | None:
    if len(data) < _HEADER.size:
        return None
    magic, version, state, pinned, _, step, generation, sequence, body, meta, xxh3 = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        return None
    return Header(state, bool(pinned), step, generation, sequence, body, meta, xxh3)


def holdings(shm: Path, ranks: Sequence[int], verify: bool) -> list[Holding]:
    """The complete snapshots of ``ranks``; with ``verify`` every byte is checked against its xxh3."""
    found = []
    for rank, slot, path, header in _headers(shm, ranks):
        if header.complete:
            problem = _problem(path, header) if verify else None
            size = header.body + header.meta
            found.append(Holding(rank, header.step, header.generation, slot, header.pinned, size, problem is None, problem))
    return found


def discard_newer(shm: Path, ranks: Sequence[int], step: int) -> None:
    """Make every snapshot of a step beyond ``step`` invalid. Call it while no rank runs, before a generation restores ``step``."""
    for _, _, path, header in _headers(shm, ranks):
        if header.step > step or header.state == WRITING:
            _put(path, AT_STATE, INVALID)
            _put(path, AT_PINNED, 0)


def unpin(shm: Path, ranks: Sequence[int], step: int) -> None:
    """Let the ranks reuse the slots that hold ``step``."""
    for _, _, path, header in _headers(shm, ranks):
        if header.pinned and header.step == step:
            _put(path, AT_PINNED, 0)


def pinned_steps(shm: Path, ranks: Sequence[int]) -> dict[int, int | None]:
    """The oldest pinned complete step by rank, None where there is none. A few microseconds per rank."""
    steps: dict[int, int | None] = dict.fromkeys(ranks)
    for rank, _, _, header in _headers(shm, ranks):
        if header.complete and header.pinned:
            known = steps[rank]
            steps[rank] = header.step if known is None else min(known, header.step)
    return steps


@contextlib.contextmanager
def open_slot(shm: Path, rank: int, step: int) -> Iterator[SlotView]:
    """The complete snapshot of ``step``. Raises StateError where there is none, or where it was overwritten while it was read."""
    for _, _, path, header in _headers(shm, [rank]):
        if header.complete and header.step == step:
            with _mapped(path, header) as data:
                end = HEADER + header.body
                try:
                    meta = json.loads(bytes(data[end : end + header.meta]))
                except ValueError as error:
                    raise StateError(f"snapshot of rank {rank} at step {step}: its description is unreadable: {error}") from error
                yield SlotView(header, data[HEADER:end], meta)
            now = read_header(path)
            if now is None or (now.sequence, now.state) != (header.sequence, COMPLETE):
                raise StateError(f"snapshot of rank {rank} at step {step} was overwritten while it was read; restart from an older state")
            return
    raise StateError(f"there is no complete snapshot of rank {rank} at step {step} in {shm}")


def _headers(shm: Path, ranks: Sequence[int]) -> Iterator[tuple[int, int, Path, Header]]:
    for rank in ranks:
        for slot in range(SLOTS):
            path = slot_path(shm, rank, slot)
            header = read_header(path)
            if header is not None:
                yield rank, slot, path, header


def _problem(path: Path, header: Header) -> str | None:
    try:
        with _mapped(path, header) as data:
            found = xxhash.xxh3_64_intdigest(data[HEADER : HEADER + header.body + header.meta])
    except StateError as error:
        return str(error)
    return None if found == header.xxh3 else f"{path.name}: the checksum of step {header.step} does not match, its bytes were changed"


@contextlib.contextmanager
def _mapped(path: Path, header: Header) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        needed = HEADER + header.body + header.meta
        if size < needed:
            raise StateError(f"{path.name}: {size} bytes, but its header promises {needed}; it was truncated")
        # Never closed by hand: it goes with the last view of it.
        yield memoryview(mmap.mmap(file.fileno(), needed, prot=mmap.PROT_READ))


def _put(path: Path, at: int, value: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, _WORD.pack(value), at)
    finally:
        os.close(fd)
