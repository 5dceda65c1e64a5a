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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.checkpoint.layout import ALIGN, Layout, lay_out, partition, spec_json
from workers.checkpoint.slots import (
    AT_PINNED,
    AT_STATE,
    COMPLETE,
    HEADER,
    NOTHING,
    SLOTS,
    WRITING,
    Header,
    checksum,
    discard_newer,
    parse_header,
    read_header,
    slot_path,
)
from workers.checkpoint.tree import LeafSpec, flatten, numpy_type, spec_of

_SPARE = 64 * 1024  # room for a description that grows, bytes
_WORD = struct.Struct("<I")


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
class _Plan:
    """What lies where, valid while the arrays keep their paths, types and shapes. Each of the two: of the shared part, the own part."""

    signature: list[Any]
    picks: tuple[int, ...]  # indices into shared + own arrays that this rank writes
    specs: tuple[LeafSpec, ...]  # of the picks
    layouts: tuple[Layout, Layout]
    tables: tuple[str, str]  # JSON of the leaf tables of both trees

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of both images; the second begins aligned."""
        shared, own = (layout.size for layout in self.layouts)
        return shared + -shared % ALIGN, own

    @property
    def bases(self) -> tuple[int, int]:
        """Where both images begin in the file."""
        return HEADER, HEADER + self.sizes[0]

    @property
    def offsets(self) -> list[int]:
        """Where each pick lies in the file."""
        return [base + at for base, layout in zip(self.bases, self.layouts, strict=True) for at in layout.offsets]


class _Slot:
    """One mapped slot file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory: mmap.mmap | None = None
        self.capacity = 0
        self.header = read_header(path) or NOTHING
        self._plan: _Plan | None = None
        self._copy: Callable[[Sequence[Any]], None] = lambda arrays: None

    @property
    def exists(self) -> bool:
        return self.header is not NOTHING

    def refresh(self) -> None:
        """See what an agent did to the header."""
        if self.memory is not None:
            self.header = parse_header(self.memory[:HEADER]) or NOTHING
        else:
            self.header = read_header(self.path) or NOTHING

    def reserve(self, size: int, plan: _Plan) -> bool:
        """Map at least ``size`` bytes laid out as ``plan``; True when memory had to be found for it. Raises OSError when there is none."""
        cold = False
        if self.memory is None or self.capacity < size:
            cold = self._map(size)
        if self._plan is not plan:
            assert self.memory is not None
            self._copy = copier(self.memory, plan.specs, plan.offsets)
            for base, layout in zip(plan.bases, plan.layouts, strict=True):
                self.memory[base : base + len(layout.prefix)] = layout.prefix
            shared_end, own_start = HEADER + plan.layouts[0].size, plan.bases[1]
            self.memory[shared_end:own_start] = bytes(own_start - shared_end)  # equal on all nodes, like the part that it belongs to
            self._plan = plan
        return cold

    def _map(self, size: int) -> bool:
        self._plan, self.memory, self._copy = None, None, lambda arrays: None  # lets go of the old mapping
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            before = os.fstat(fd).st_size
            self.capacity = max(before, -(-(size + _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE)
            if self.capacity > before:
                os.posix_fallocate(fd, 0, self.capacity)
            self.memory = mmap.mmap(fd, self.capacity)
        finally:
            os.close(fd)
        return self.capacity > before

    def fill(self, header: Header, arrays: Sequence[Any], texts: tuple[bytes, bytes]) -> None:
        memory = self.memory
        assert memory is not None
        _put_header(memory, replace(header, state=WRITING, pinned=False))
        self._copy(arrays)
        sections = header.shared_sections(), header.own_sections()
        with memoryview(memory) as view:
            found = []
            for (image, place), text in zip(sections, texts, strict=True):
                memory[place] = text
                with view[image] as content:
                    found.append(checksum(content, text))
        done = replace(header, shared_xxh3=found[0], own_xxh3=found[1])
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
        self.newest = max((s.header.step for s in self._slots if s.header.complete), default=0)

    def write(self, step: int, shared: Any, own: Any, pin: bool) -> Written:
        """Copy the state of ``step``: ``shared`` is equal on all ranks, ``own`` is this rank's. ``pin`` keeps the slot until an agent
        unpins it; it is dropped while an older pinned slot is there. Raises StateError for a leaf that cannot be saved, OSError when
        shared memory is full."""
        begun = time.perf_counter()
        shared_skeleton, shared_leaves = flatten(shared, "shared")
        own_skeleton, own_leaves = flatten(own, "own")
        leaves = shared_leaves + own_leaves
        plan = self._plan_for(leaves, len(shared_leaves))
        texts = _describe(shared_skeleton, plan.tables[0]), _describe(own_skeleton, plan.tables[1])
        slot, pinned = self._choose()
        self._sequence += 1
        pin = pin and not pinned
        counts = (self._place.rank, self._place.world_size, step, self._place.generation, self._sequence)
        header = Header(COMPLETE, pin, *counts, *plan.sizes, len(texts[0]), len(texts[1]), 0, 0)
        cold = slot.reserve(header.end, plan)
        slot.fill(header, [leaves[i][1] for i in plan.picks], texts)
        self.newest = step
        return Written(step, pin, time.perf_counter() - begun, cold)

    def pin_newest(self) -> None:
        """Pin the newest complete slot, unless an older one is pinned."""
        newest, pinned = self._newest_and_pinned()
        if newest is not None and newest.memory is not None and not pinned:
            _WORD.pack_into(newest.memory, AT_PINNED, 1)

    def _newest_and_pinned(self) -> tuple[_Slot | None, list[_Slot]]:
        for slot in self._slots:
            slot.refresh()
        complete = [s for s in self._slots if s.header.complete]
        return max(complete, key=lambda s: s.header.sequence, default=None), [s for s in complete if s.header.pinned]

    def _choose(self) -> tuple[_Slot, bool]:
        """(the slot to overwrite, is one pinned): the oldest that is neither pinned nor the newest complete one."""
        newest, pinned = self._newest_and_pinned()
        free = [s for s in self._slots if s is not newest and s not in pinned]
        # A slot that exists has warm pages; the third is made only while one is pinned.
        usable = [s for s in free if s.exists]
        if not usable:
            return free[0], bool(pinned)
        return min(usable, key=lambda s: (s.header.complete, s.header.sequence)), bool(pinned)

    def _plan_for(self, leaves: Sequence[tuple[str, Any]], shared: int) -> _Plan:
        signature = [(path, leaf.dtype, leaf.shape, type(leaf)) for path, leaf in leaves]
        if self._plan is None or self._plan.signature != signature:
            specs = [spec_of(path, leaf) for path, leaf in leaves]
            owner = partition({s.path: s.size for s in specs[:shared]}, self._place.local_world_size)
            picks = tuple(i for i, s in enumerate(specs) if i >= shared or owner[s.path] == self._place.local_rank)
            parts = [specs[i] for i in picks if i < shared], specs[shared:]
            layouts = lay_out(parts[0]), lay_out(parts[1])
            tables = json.dumps(spec_json(specs[:shared])), json.dumps(spec_json(specs[shared:]))
            self._plan = _Plan(signature, picks, (*parts[0], *parts[1]), layouts, tables)
        return self._plan


def _describe(skeleton: Any, table: str) -> bytes:
    return f'{{"skeleton":{json.dumps(skeleton)},"leaves":{table}}}'.encode()


def copier(memory: mmap.mmap, specs: Sequence[LeafSpec], offsets: Sequence[int]) -> Callable[[Sequence[Any]], None]:
    """A function that copies arrays, given in the order of ``specs``, to ``offsets`` of ``memory``."""
    torch_at = [i for i, s in enumerate(specs) if s.kind == "torch" and s.size]
    numpy_at = [i for i, s in enumerate(specs) if s.kind != "torch" and s.size]
    tensors = [_torch_view(memory, specs[i], offsets[i]) for i in torch_at]
    views = [_numpy_view(memory, specs[i], offsets[i]) for i in numpy_at]

    def copy(arrays: Sequence[Any]) -> None:
        for i, view in zip(numpy_at, views, strict=True):
            view[...] = arrays[i]
        if tensors:
            import torch

            with torch.no_grad():
                torch._foreach_copy_(tensors, [arrays[i] for i in torch_at])

    return copy


def _torch_view(memory: mmap.mmap, spec: LeafSpec, offset: int) -> Any:
    import torch

    dtype = getattr(torch, spec.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=spec.size // dtype.itemsize, offset=offset).view(spec.shape)


def _numpy_view(memory: mmap.mmap, spec: LeafSpec, offset: int) -> Any:
    import numpy as np

    dtype = numpy_type(spec.dtype)
    return np.frombuffer(memory, dtype=dtype, count=spec.size // dtype.itemsize, offset=offset).reshape(spec.shape)


def _put_header(memory: mmap.mmap, header: Header) -> None:
    packed = header.pack()
    memory[: len(packed)] = packed
