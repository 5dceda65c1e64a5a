"""The rank's side of a snapshot: the newest training state, copied into shared memory that outlives the process.

Invariants: the newest complete slot and a pinned one are never written to; a slot becomes COMPLETE after its last byte; arrays that all
ranks share are split over the ranks of the node, so a node's slots of one step hold one replica together. The stall is one memory copy
and one checksum; pages are reserved before they are used, so a full /dev/shm is an OSError and never a SIGBUS.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.checkpoint.admission import slots_that_fit
from workers.checkpoint.copying import Copier
from workers.checkpoint.layout import ALIGN, Layout, lay_out, partition, spec_json
from workers.checkpoint.outline import Outline
from workers.checkpoint.slots import (
    AT_PINNED,
    AT_STATE,
    COMPLETE,
    HEADER,
    NOTHING,
    SLOTS,
    WRITING,
    Header,
    discard_newer,
    read_header,
    slot_path,
)
from workers.checkpoint.tree import LeafSpec, flatten, scalars_json, spec_of

_SPARE = 64 * 1024  # room for a description that grows, bytes
_WORD = struct.Struct("<I")
_WORDS = struct.Struct("<II")  # state and pinned, side by side


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    generation: int


@dataclass(frozen=True)
class Written:
    """``seconds``: how long the rank stood still. ``cold``: memory had to be reserved, so this one says nothing about the next."""

    step: int
    pinned: bool
    seconds: float
    cold: bool


@dataclass(frozen=True)
class _Part:
    """What lies where in one part of a slot, valid while the state keeps its shape."""

    outline: Outline
    picks: tuple[int, ...]  # indices of the arrays that this rank writes
    specs: tuple[LeafSpec, ...]  # of the picks
    layout: Layout
    text: str  # the description but for the scalars

    def describe(self, scalars: Sequence[Any]) -> bytes:
        return f'{self.text},"scalars":{scalars_json(scalars)}}}'.encode()


@dataclass(frozen=True)
class _Plan:
    shared: _Part
    own: _Part

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of both images; the second begins aligned."""
        shared = self.shared.layout.size
        return shared + -shared % ALIGN, self.own.layout.size


class _Slot:
    """One mapped slot file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory: mmap.mmap | None = None
        self.capacity = 0
        self.header = read_header(path) or NOTHING
        self._plan: _Plan | None = None
        self._copiers: tuple[Copier, Copier] | None = None

    @property
    def exists(self) -> bool:
        return self.header is not NOTHING

    def refresh(self) -> None:
        """See what an agent did to the header. Agents make no slots."""
        if self.memory is not None:
            state, pinned = _WORDS.unpack_from(self.memory, AT_STATE)
            if (state, pinned) != (self.header.state, self.header.pinned):
                self.header = replace(self.header, state=state, pinned=bool(pinned))
        elif self.exists:
            self.header = read_header(self.path) or NOTHING

    def reserve(self, size: int, plan: _Plan) -> bool:
        """Map at least ``size`` bytes laid out as ``plan``; True when memory had to be found for it. Raises OSError when there is none."""
        cold = False
        if self.memory is None or self.capacity < size:
            cold = self._map(size)
        if self._plan is not plan:
            assert self.memory is not None
            _WORD.pack_into(self.memory, AT_STATE, WRITING)
            shared, own = plan.sizes
            self._copiers = (
                Copier(self.memory, HEADER, shared, plan.shared.specs, plan.shared.layout),
                Copier(self.memory, HEADER + shared, own, plan.own.specs, plan.own.layout),
            )
            self._plan = plan
        return cold

    def drop(self) -> None:
        """Give its memory back."""
        self.path.unlink(missing_ok=True)
        self._plan, self._copiers, self.memory, self.capacity, self.header = None, None, None, 0, NOTHING

    def _map(self, size: int) -> bool:
        self._plan, self._copiers, self.memory = None, None, None  # lets go of the old mapping
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            before = os.fstat(fd).st_size
            self.capacity = max(before, _pages(size))
            if self.capacity > before:
                os.posix_fallocate(fd, 0, self.capacity)
            self.memory = mmap.mmap(fd, self.capacity)
        finally:
            os.close(fd)
        return self.capacity > before

    def fill(self, header: Header, arrays: tuple[Sequence[Any], Sequence[Any]], texts: tuple[bytes, bytes]) -> None:
        memory, copiers = self.memory, self._copiers
        assert memory is not None
        assert copiers is not None
        _put_header(memory, replace(header, state=WRITING, pinned=False))
        sums = []
        for copier, part, text, (_, place) in zip(copiers, arrays, texts, (header.shared_sections(), header.own_sections()), strict=True):
            digest = copier.copy(part)
            memory[place] = text
            digest.update(memory[place])
            sums.append(digest.intdigest())
        done = replace(header, shared_xxh3=sums[0], own_xxh3=sums[1])
        _put_header(memory, replace(done, state=WRITING))
        _WORD.pack_into(memory, AT_STATE, COMPLETE)
        self.header = replace(done, state=COMPLETE)


class SnapshotWriter:
    """Writes the snapshots of one rank. ``restored`` is the step that this generation starts from: newer ones are void."""

    def __init__(self, shm: Path, place: Place, restored: int) -> None:
        discard_newer(shm, [place.rank], restored)
        self._place = place
        self._slots = [_Slot(slot_path(shm, place.rank, i)) for i in range(SLOTS)]
        self._sequence = max((slot.header.sequence for slot in self._slots if slot.header.sound), default=0)
        self._plan: _Plan | None = None
        self._shm = shm
        self.size = 0  # bytes of the slot that was admitted last
        self.limit = SLOTS  # slots that memory has room for
        self.newest = max((s.header.step for s in self._slots if s.header.complete), default=0)

    def takes(self, pin: bool) -> bool:
        """False where memory has no room for a further snapshot now."""
        return self._choose(pin) is not None

    def write(self, step: int, shared: Any, own: Any, pin: bool) -> Written | None:
        """Copy the state of ``step``: ``shared`` is equal on all ranks, ``own`` is this rank's. ``pin`` keeps the slot until an agent
        unpins it; it is dropped while an older pinned slot is there. None: there is no slot for it now, see ``limit``. Raises StateError
        for a leaf that cannot be saved, OSError when shared memory is full."""
        begun = time.perf_counter()
        plan, (shared_arrays, shared_scalars), (own_arrays, own_scalars) = self._look(shared, own)
        arrays = [shared_arrays[i] for i in plan.shared.picks], own_arrays
        texts = plan.shared.describe(shared_scalars), plan.own.describe(own_scalars)
        needed = _pages(HEADER + sum(plan.sizes) + len(texts[0]) + len(texts[1]))
        if needed - _SPARE > self.size:
            self._admit(needed)
        slot = self._choose(pin)
        if slot is not None and not slot.exists:  # since the last time memory may have gone elsewhere
            self._admit(max(needed, self.size))
            slot = self._choose(pin)
        if slot is None:
            return None
        self._sequence += 1
        pin = pin and not self._pinned()
        counts = (self._place.rank, self._place.world_size, step, self._place.generation, self._sequence)
        header = Header(COMPLETE, pin, *counts, *plan.sizes, len(texts[0]), len(texts[1]), 0, 0)
        cold = slot.reserve(header.end, plan)
        slot.fill(header, arrays, texts)
        self.newest = step
        return Written(step, pin, time.perf_counter() - begun, cold)

    def _admit(self, size: int) -> None:
        """Ask for room before a slot is made or grows; slots that have none any more are given back."""
        self.size = size
        self.limit = min(self.limit, slots_that_fit(self._shm, size, self._place.local_world_size))
        newest = self._newest()
        made = [s for s in self._slots if s.exists]
        spare = [s for s in made if s is not newest and not (s.header.complete and s.header.pinned)]
        for slot in spare[: max(0, len(made) - max(1, self.limit))]:
            slot.drop()

    def pin_newest(self) -> None:
        """Pin the newest complete slot, unless an older one is pinned."""
        newest = self._newest()
        if newest is not None and newest.memory is not None and not self._pinned():
            _WORD.pack_into(newest.memory, AT_PINNED, 1)

    def _newest(self) -> _Slot | None:
        for slot in self._slots:
            slot.refresh()
        return max((s for s in self._slots if s.header.complete), key=lambda s: s.header.sequence, default=None)

    def _pinned(self) -> bool:
        return any(s.header.complete and s.header.pinned for s in self._slots)

    def _choose(self, pin: bool) -> _Slot | None:
        """The slot to overwrite: the oldest that is neither pinned nor the newest complete one. A slot that exists has warm pages; the
        third is made only while one is pinned. Where memory has room for one only, it is written for checkpoints."""
        if self.limit == 0:
            return None
        newest = self._newest()
        usable = [s for s in self._slots if s.exists and s is not newest and not (s.header.complete and s.header.pinned)]
        if usable:
            return min(usable, key=lambda s: (s.header.complete, s.header.sequence))
        missing = [s for s in self._slots if not s.exists]
        if missing and SLOTS - len(missing) < self.limit:
            return missing[0]
        return newest if self.limit == 1 and pin and not self._pinned() else None

    def _look(self, shared: Any, own: Any) -> tuple[_Plan, tuple[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
        """(what lies where, arrays and scalars of the shared part, those of the own part)."""
        if self._plan is not None:
            known, mine = self._plan.shared.outline.read(shared), self._plan.own.outline.read(own)
            if known is not None and mine is not None:
                return self._plan, known, mine
        place = self._place
        shared_part, known = _plan(shared, "shared", place.local_rank, place.local_world_size)
        own_part, mine = _plan(own, "own", 0, 1)
        self._plan = _Plan(shared_part, own_part)
        return self._plan, known, mine


def _plan(tree: Any, root: str, part: int, parts: int) -> tuple[_Part, tuple[list[Any], list[Any]]]:
    """(the plan of a tree of which this rank writes one of ``parts`` parts, its arrays and scalars)."""
    scalars: list[Any] = []
    skeleton, leaves = flatten(tree, root, scalars)
    specs = [spec_of(path, leaf) for path, leaf in leaves]
    owner = partition({s.path: s.size for s in specs}, parts)
    picks = tuple(i for i, s in enumerate(specs) if owner[s.path] == part)
    chosen = tuple(specs[i] for i in picks)
    text = f'{{"skeleton":{json.dumps(skeleton)},"leaves":{json.dumps(spec_json(specs))}'
    arrays = [leaf for _, leaf in leaves]
    return _Part(Outline(skeleton, arrays), picks, chosen, lay_out(chosen), text), (arrays, scalars)


def _pages(size: int) -> int:
    """``size`` with room for a description that grows, in whole pages; bytes."""
    return -(-(size + _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE


def _put_header(memory: mmap.mmap, header: Header) -> None:
    packed = header.pack()
    memory[: len(packed)] = packed
