"""Whether a rank's snapshots fit into the memory of its node, asked before memory is taken.

Invariants: room is asked for all ranks of the node at once, so that ranks that start together do not each count on the same bytes; a tenth
of what is taken stays free on top, so that snapshots do not push a node or a container against its limit.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from workers.checkpoint.room import free_bytes
from workers.checkpoint.slots import SLOTS

MARGIN = 1.1
REASON = "SnapshotsDegraded"
_COST = {
    2: "no snapshots are taken while a checkpoint is written",
    1: "snapshots are taken for checkpoints only, so a failure costs the steps since the last checkpoint",
    0: "there are no snapshots and no checkpoints, so a failure costs all steps since the last checkpoint that was written before",
}


def slots_that_fit(shm: Path, size: int, local_ranks: int) -> int:
    """How many slots of ``size`` bytes each rank of this node may have, at most SLOTS; those that exist already count as they are.
    Raises OSError where ``shm`` is gone."""
    held = sum(entry.stat().st_size for entry in os.scandir(shm) if entry.name.startswith("snap-"))
    room = free_bytes(shm) / MARGIN + held
    return max(0, min(SLOTS, int(room / max(1, local_ranks) // size)))


def sentence(slots: int, size: int, shm: Path) -> str:
    """What the user should hear when only so many slots fit."""
    return (
        f"memory has room for {slots} snapshots of {size / 2**20:.0f} MiB for each rank, {SLOTS} are needed: {_COST[slots]}; "
        f"enlarge shared memory ({shm.parent}) or the memory limit, or use more nodes"
    )


def leave_note(shm: Path, rank: int, slots: int, text: str) -> None:
    """For the agent to find; the first rank of the node that gets this far tells it for all."""
    fresh = shm / f".degraded-{slots}.{rank}"
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps([rank, text]))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, _note(shm, slots))
        fresh.unlink()


def notes(shm: Path, told: frozenset[int]) -> dict[int, tuple[int, str]]:
    """(rank, sentence) by number of slots, of those that were not ``told`` yet."""
    found = {}
    for slots in _COST:
        if slots not in told:
            with contextlib.suppress(OSError, ValueError):
                rank, text = json.loads(_note(shm, slots).read_text())
                found[slots] = (int(rank), str(text))
    return found


def _note(shm: Path, slots: int) -> Path:
    return shm / f"degraded-{slots}"
