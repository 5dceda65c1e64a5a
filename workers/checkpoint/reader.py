"""The one way in which a rank gets its state back: from local files, be they the snapshot slots of its node or a staged checkpoint.

Invariants: arrays are copied out, nothing of what a rank restores aliases the files; what is read is exactly what the skeletons name, or a
StateError.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint.format import MANIFEST, Manifest, Tree, parse_manifest, rank_file
from workers.checkpoint.layout import locate, specs_from_json
from workers.checkpoint.slots import open_slot
from workers.checkpoint.tree import LeafSpec, StateError, materialize, numpy_type, unflatten


@dataclass(frozen=True)
class Restored:
    """``shared``: equal on all ranks; ``own``: this rank's. Trees as they were saved. ``ranks``: where another number of ranks saved them,
    the own trees of all, as views of the files, and ``own`` is None."""

    step: int
    shared: Any
    own: Any
    ranks: tuple[Any, ...] = ()


def read_snapshot(shm: Path, rank: int, local_ranks: Sequence[int], step: int) -> Restored:
    """From shared memory: ``local_ranks`` hold the shared arrays together. Raises StateError; the bytes are not verified again here."""
    with ExitStack() as stack:
        slots = {r: stack.enter_context(open_slot(shm, r, step)) for r in local_ranks}
        arrays: dict[str, memoryview] = {}
        for slot in slots.values():
            arrays.update(slot.shared.arrays)
        mine = slots[rank]
        shared = _assemble(mine.shared.tree, arrays)
        own = _assemble(mine.own.tree, mine.own.arrays)
    return Restored(step, shared, own)


def read_staged(folder: Path, rank: int, world_size: int) -> Restored:
    """From a checkpoint that ``stage`` has copied to this node and verified. Raises StateError, OSError."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    arrays: dict[str, memoryview] = {}
    for name in sorted(set(manifest.where.values())):
        arrays.update(_arrays(folder / name))
    shared = _assemble(manifest.shared, arrays)
    if manifest.world_size != world_size:
        return Restored(manifest.step, shared, None, tuple(_own(folder, manifest, r, _view) for r in range(manifest.world_size)))
    return Restored(manifest.step, shared, _own(folder, manifest, rank, materialize))


def _own(folder: Path, manifest: Manifest, rank: int, make: Callable[[LeafSpec, memoryview], Any]) -> Any:
    own = manifest.own.get(str(rank))
    if own is None:
        raise StateError(f"the checkpoint of step {manifest.step}, written by {manifest.world_size} ranks, lacks rank {rank}")
    return _assemble(own, _arrays(folder / rank_file(rank)) if own.leaves else {}, make)


def _arrays(file: Path) -> dict[str, memoryview]:
    with open(file, "rb") as opened:
        # Copy on write: a view of it is an array like any other, and the file stays as it is.
        return locate(memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)))


def _view(spec: LeafSpec, data: memoryview) -> Any:
    """As materialize, without a copy; arrays are aligned in our files."""
    if not spec.size or spec.kind == "scalar":
        return materialize(spec, data)
    if spec.kind == "torch":
        import torch

        return torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)
    import numpy as np

    return np.frombuffer(data, dtype=numpy_type(spec.dtype)).reshape(spec.shape)


def _assemble(tree: Tree, arrays: Mapping[str, memoryview], make: Callable[[LeafSpec, memoryview], Any] = materialize) -> Any:
    leaves = []
    for spec in specs_from_json(tree.leaves):
        data = arrays.get(spec.path)
        if data is None or len(data) != spec.size:
            found = "is missing" if data is None else f"has {len(data)} bytes instead of {spec.size}"
            raise StateError(f"the saved array {spec.path} {found}")
        leaves.append(make(spec, data))
    return unflatten(tree.skeleton, leaves)
