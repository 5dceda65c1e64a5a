"""The one way in which a rank gets its state back: from local files, be they the snapshot slots of its node or a staged checkpoint.

Invariants: arrays are copied out, nothing aliases the files; what is read is exactly what the skeletons name, or a StateError.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint.format import MANIFEST, Tree, parse_manifest, rank_file
from workers.checkpoint.layout import locate, specs_from_json
from workers.checkpoint.slots import open_slot
from workers.checkpoint.tree import StateError, materialize, unflatten


@dataclass(frozen=True)
class Restored:
    """``shared``: equal on all ranks; ``own``: this rank's. Trees as they were saved."""

    step: int
    shared: Any
    own: Any


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


def read_staged(folder: Path, rank: int) -> Restored:
    """From a checkpoint that ``stage`` has copied to this node and verified. Raises StateError, OSError."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    own = manifest.own.get(str(rank))
    if own is None:
        raise StateError(f"the checkpoint of step {manifest.step}, written by {manifest.world_size} ranks, lacks rank {rank}")
    names = set(manifest.where.values()) | ({rank_file(rank)} if own.leaves else set())
    arrays: dict[str, memoryview] = {}
    for name in sorted(names):
        with open(folder / name, "rb") as file:
            arrays.update(locate(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))))
    return Restored(manifest.step, _assemble(manifest.shared, arrays), _assemble(own, arrays))


def _assemble(tree: Tree, arrays: Mapping[str, memoryview]) -> Any:
    leaves = []
    for spec in specs_from_json(tree.leaves):
        data = arrays.get(spec.path)
        if data is None or len(data) != spec.size:
            found = "is missing" if data is None else f"has {len(data)} bytes instead of {spec.size}"
            raise StateError(f"the saved array {spec.path} {found}")
        leaves.append(materialize(spec, data))
    return unflatten(tree.skeleton, leaves)
