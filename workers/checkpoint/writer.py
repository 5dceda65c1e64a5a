"""From pinned snapshots to a checkpoint in storage: each agent writes its node's share, the coordinator commits the manifest.

Invariants: nothing is overwritten in place; the manifest is written last; a checkpoint whose parts disagree is never committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

from workers.checkpoint.format import (
    COMMITTED,
    FOLDER,
    MANIFEST,
    FileEntry,
    Manifest,
    Share,
    folder_name,
    is_finite,
    manifest_bytes,
    merge,
    rank_file,
    shared_file,
)
from workers.checkpoint.layout import lay_out, partition, specs_from_json
from workers.checkpoint.lease import Lease, check
from workers.checkpoint.slots import open_slot
from workers.checkpoint.storage import LocalFolder, RemoteFolder, open_folder
from workers.checkpoint.tree import LeafSpec, StateError
from workers.messages import CheckpointRecord

PIECE = 8 << 20  # bytes between two reports of progress
Progress = Callable[[int, int], None]  # (bytes that are written, bytes in all); what it raises ends the write


def write_share(
    shm: Path,
    storage_url: str,
    step: int,
    attempt: int,
    generation: int,
    node_index: int,
    node_count: int,
    ranks: Sequence[int],
    progress: Progress = lambda written, total: None,
) -> Share:
    """Write this node's part of the checkpoint of ``step`` from the slots of its ``ranks``, which must be pinned at that step.

    The shared arrays are split over all nodes by bytes. Raises StateError (no such snapshot, storage full, already committed), OSError.
    """
    begun = time.monotonic()
    folder = open_folder(storage_url).child(FOLDER).child(folder_name(step, attempt, generation))
    if folder.size(MANIFEST) is not None:
        raise StateError(f"{folder.url} is committed already; a checkpoint is never overwritten")
    with ExitStack() as stack:
        slots = {rank: stack.enter_context(open_slot(shm, rank, step)) for rank in ranks}
        tree = slots[ranks[0]].shared.tree
        for rank, slot in slots.items():
            if slot.shared.tree != tree:
                raise StateError(f"step {step}: ranks {ranks[0]} and {rank} differ in a part that must be equal on all ranks")
        specs = specs_from_json(tree.leaves)
        owner = partition({s.path: s.size for s in specs}, node_count)
        mine = [s for s in specs if owner[s.path] == node_index]
        shared = {path: data for slot in slots.values() for path, data in slot.shared.arrays.items()}
        own = {str(rank): slot.own.tree for rank, slot in slots.items()}
        own_specs = {rank: specs_from_json(slot.own.tree.leaves) for rank, slot in slots.items()}
        meter = _Meter(sum(s.size for s in [*mine, *(s for specs in own_specs.values() for s in specs)]), progress)
        files = [_write(folder, shared_file(node_index), mine, shared, meter)] if mine else []
        files += [_write(folder, rank_file(rank), specs, slots[rank].own.arrays, meter) for rank, specs in own_specs.items() if specs]
    where = {s.path: shared_file(node_index) for s in mine}
    return Share(node_index, list(ranks), files, tree, own, where, time.monotonic() - begun)


def commit(
    storage_url: str,
    job_id: str,
    attempt: int,
    generation: int,
    step: int,
    world_size: int,
    shares: Sequence[Share],
    started_at: float,
    now: float,
    *,
    wanted: Callable[[], bool] = lambda: True,
) -> CheckpointRecord:
    """Write the manifest, after which the checkpoint exists. Times are Unix seconds. ``wanted`` is asked last, for storage may have taken
    long. Raises StateError where the shares do not make a whole, Fenced where a later generation has taken the folder, GivenUp, OSError."""
    root = open_folder(storage_url).child(FOLDER)
    folder = root.child(folder_name(step, attempt, generation))
    shared, own, where, files = merge(shares, world_size)
    for file in files:
        found = folder.size(file.name)
        if found != file.bytes:
            raise StateError(f"{folder.url}/{file.name} has {found} bytes, its writer reported {file.bytes}; not committed")
    nodes = [share.ranks for share in sorted(shares, key=lambda s: s.node_index)]
    manifest = Manifest(job_id, attempt, generation, step, world_size, nodes, started_at, now, files, shared, own, where, is_finite(own))
    check(storage_url, Lease(job_id, attempt, generation))
    if not wanted():
        raise GivenUp(f"generation {generation} ended before the commit, or the write was given up")
    size, _ = folder.write(MANIFEST, [manifest_bytes(manifest)])
    with suppress(Exception):  # it exists; the next commit marks the folder too
        if root.size(COMMITTED) is None:
            root.write(COMMITTED, [])
    total = size + sum(file.bytes for file in files)
    return CheckpointRecord(
        job_id, attempt, generation, step, folder.url, total, len(files) + 1, world_size, now, now - started_at, manifest.finite
    )


class GivenUp(StateError):
    """Nobody wants this checkpoint any more."""


class _Meter:
    """Counts what is written and tells it."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress, self._written = total, progress, 0
        progress(0, total)

    def pieces(self, data: memoryview) -> Iterator[memoryview]:
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            yield piece
            self._written += len(piece)
            self._progress(self._written, self._total)


def _write(
    folder: LocalFolder | RemoteFolder, name: str, specs: Sequence[LeafSpec], arrays: dict[str, memoryview], meter: _Meter
) -> FileEntry:
    missing = [s.path for s in specs if s.path not in arrays]
    if missing:
        raise StateError(f"the snapshots of this node lack {len(missing)} arrays, the first is {missing[0]}")
    layout = lay_out(specs)
    # In the order in which they lie in the file.
    ordered = sorted(range(len(specs)), key=lambda i: (layout.offsets[i], specs[i].size))
    body = (piece for i in ordered for piece in meter.pieces(arrays[specs[i].path]))
    size, xxh3 = folder.write(name, chain([layout.prefix], body))
    return FileEntry(name, size, xxh3)
