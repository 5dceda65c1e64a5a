"""A rank's snapshot slots in shared memory as others see them: the header, and what an agent does with it.

A slot is a file ``snap-<rank>-<slot>``: [4096-byte header][shared arrays][own arrays][shared description][own description]. Arrays are a
safetensors image, a description is JSON; shared arrays are this rank's part of what all ranks hold equal, own ones are the rank's alone.
Each of the two has a checksum of its own, so that a peer's replica can stand in for a damaged shared part. Its writer sets WRITING first
and COMPLETE last, so a process killed in between leaves a slot that nobody takes. Invariants: no framework is imported here; a slot is
only ever read when COMPLETE; the rank writes all fields but ``pinned``, which an agent may clear, and ``state``, which an agent may set
to INVALID.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import xxhash

from workers.checkpoint.format import Tree
from workers.checkpoint.layout import locate
from workers.checkpoint.tree import StateError, fill
from workers.messages import Holding

MAGIC = b"KEEPSNAP"
VERSION = 3
HEADER = 4096
SLOTS = 3

EMPTY, WRITING, COMPLETE, INVALID = range(4)

# magic, version, state, pinned, rank, world size, step, generation, sequence, bytes of the four sections, xxh3 of both parts, of the header
_HEADER = struct.Struct("<8sIIIIIQQQQQQQQQQ")
AT_STATE = 12
AT_PINNED = 16
_WORD = struct.Struct("<I")
_CHECK = struct.Struct("<Q")
_AT_CHECK = _HEADER.size - _CHECK.size


@dataclass(frozen=True, slots=True)
class Header:
    """``arrays``, ``text``: bytes of the safetensors image and of the description. ``sequence`` grows with each snapshot of the rank, also
    over generations. ``sound``: the header matches its own checksum, which covers all but ``state`` and ``pinned``."""

    state: int
    pinned: bool
    rank: int
    world_size: int
    step: int
    generation: int
    sequence: int
    shared_arrays: int
    own_arrays: int
    shared_text: int
    own_text: int
    shared_xxh3: int
    own_xxh3: int
    sound: bool = True

    @property
    def complete(self) -> bool:
        return self.state == COMPLETE and self.sound

    @property
    def end(self) -> int:
        """Bytes of the slot that are in use."""
        return HEADER + self.shared_arrays + self.own_arrays + self.shared_text + self.own_text

    def shared_sections(self) -> tuple[slice, slice]:
        """Where (arrays, description) of the shared part lie in the file."""
        text = HEADER + self.shared_arrays + self.own_arrays
        return slice(HEADER, HEADER + self.shared_arrays), slice(text, text + self.shared_text)

    def own_sections(self) -> tuple[slice, slice]:
        start = HEADER + self.shared_arrays
        return slice(start, start + self.own_arrays), slice(self.end - self.own_text, self.end)

    def pack(self) -> bytes:
        fields = (self.rank, self.world_size, self.step, self.generation, self.sequence)
        sizes = (self.shared_arrays, self.own_arrays, self.shared_text, self.own_text)
        packed = _HEADER.pack(MAGIC, VERSION, self.state, self.pinned, *fields, *sizes, self.shared_xxh3, self.own_xxh3, 0)
        return packed[:_AT_CHECK] + _CHECK.pack(_check(packed))


NOTHING = Header(EMPTY, False, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class SlotPart:
    """One part of a slot, parsed when it is asked for. Both raise StateError where the bytes are not what they should be."""

    name: str
    image: memoryview
    text: memoryview

    @cached_property
    def tree(self) -> Tree:
        try:
            described = json.loads(bytes(self.text))
            return Tree(fill(described["skeleton"], described["scalars"]), described["leaves"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise StateError(f"{self.name}: its description is unreadable: {error}") from error

    @cached_property
    def arrays(self) -> dict[str, memoryview]:
        """By path."""
        return locate(self.image)


@dataclass(frozen=True)
class SlotView:
    """A mapped complete slot."""

    header: Header
    shared: SlotPart
    own: SlotPart


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
    magic, version, state, pinned, *fields = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        return None
    fields[-1] = fields[-1] == _check(data[: _HEADER.size])
    return Header(state, bool(pinned), *fields)


def holdings(shm: Path, ranks: Sequence[int], verify: bool) -> list[Holding]:
    """The complete snapshots of ``ranks``; with ``verify`` every byte is checked against its xxh3."""
    found = []
    for rank, slot, path, header in headers(shm, ranks):
        if header.state == COMPLETE:
            shared, own = _problems(path, header) if verify or not header.sound else (None, None)
            size = max(0, header.end - HEADER)
            problem = "; ".join(dict.fromkeys(p for p in (shared, own) if p)) or None
            found.append(Holding(rank, header.step, header.generation, slot, header.pinned, size, shared is None, own is None, problem))
    return found


def discard_newer(shm: Path, ranks: Sequence[int], step: int) -> None:
    """Make every snapshot of a step beyond ``step`` invalid. Call it while no rank runs, before a generation restores ``step``."""
    for _, _, path, header in headers(shm, ranks):
        if header.step > step or header.state == WRITING or not header.sound:
            _put(path, AT_STATE, INVALID)
            _put(path, AT_PINNED, 0)


def unpin(shm: Path, ranks: Sequence[int], step: int) -> None:
    """Let the ranks reuse the slots that hold ``step``."""
    for _, _, path, header in headers(shm, ranks):
        if header.pinned and header.step == step:
            _put(path, AT_PINNED, 0)


def pinned_steps(shm: Path, ranks: Sequence[int]) -> dict[int, int | None]:
    """The oldest pinned complete step by rank, None where there is none. A few microseconds per rank."""
    steps: dict[int, int | None] = dict.fromkeys(ranks)
    for rank, _, _, header in headers(shm, ranks):
        if header.complete and header.pinned:
            known = steps[rank]
            steps[rank] = header.step if known is None else min(known, header.step)
    return steps


@contextlib.contextmanager
def open_slot(shm: Path, rank: int, step: int) -> Iterator[SlotView]:
    """The complete snapshot of ``step``. Raises StateError where there is none, or where it was overwritten while it was read."""
    for _, _, path, header in headers(shm, [rank]):
        if header.complete and header.step == step:
            name = f"snapshot of rank {rank} at step {step}"
            with mapped(path, header) as data:
                parts = [SlotPart(name, data[image], data[text]) for image, text in (header.shared_sections(), header.own_sections())]
                yield SlotView(header, *parts)
            now = read_header(path)
            if now is None or (now.sequence, now.state) != (header.sequence, COMPLETE):
                raise StateError(f"{name} was overwritten while it was read; restart from an older state")
            return
    raise StateError(f"there is no complete snapshot of rank {rank} at step {step} in {shm}")


def headers(shm: Path, ranks: Sequence[int]) -> Iterator[tuple[int, int, Path, Header]]:
    """(rank, slot, file, header). The slot of another rank that lies in its place is not sound."""
    for rank in ranks:
        for slot in range(SLOTS):
            path = slot_path(shm, rank, slot)
            header = read_header(path)
            if header is not None:
                yield rank, slot, path, header if header.rank == rank else replace(header, sound=False)


def _problems(path: Path, header: Header) -> tuple[str | None, str | None]:
    """What is wrong with (the shared part, the own part)."""
    if not header.sound:
        return (f"{path.name}: its header does not match its checksum, or is that of another rank; the file was changed",) * 2
    try:
        with mapped(path, header) as data:
            sound = [
                checksum(data[image], data[text]) == xxh3
                for (image, text), xxh3 in (
                    (header.shared_sections(), header.shared_xxh3),
                    (header.own_sections(), header.own_xxh3),
                )
            ]
    except StateError as error:
        return (str(error),) * 2
    shared, own = (
        None if good else f"{path.name}: the checksum of the {part} part of step {header.step} does not match, its bytes were changed"
        for part, good in zip(("shared", "own"), sound, strict=True)
    )
    return shared, own


def checksum(arrays: memoryview, text: bytes | memoryview) -> int:
    """The xxh3 of one part."""
    digest = xxhash.xxh3_64(arrays)
    digest.update(text)
    return digest.intdigest()


def _check(packed: bytes) -> int:
    """The checksum of a header's fields that only its writer sets."""
    return xxhash.xxh3_64_intdigest(packed[:AT_STATE] + packed[AT_PINNED + _WORD.size : _AT_CHECK])


@contextlib.contextmanager
def mapped(path: Path, header: Header) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < header.end:
            raise StateError(f"{path.name}: {size} bytes, but its header promises {header.end}; it was truncated")
        # Never closed by hand: it goes with the last view of it.
        yield memoryview(mmap.mmap(file.fileno(), header.end, prot=mmap.PROT_READ))


def _put(path: Path, at: int, value: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, _WORD.pack(value), at)
    finally:
        os.close(fd)
