"""What a snapshot and a checkpoint cost, beside a plain copy and a plain write of the same bytes: in one run, in turns.

``python benchmarks/checkpoint.py [--sizes 0 100 500 2000] [--pairs 12]``; a quick look: ``--sizes 0 100 --pairs 3``. Sizes are MB of a
model with its AdamW, 0 is the state of examples/shakespeare. The stall is all of a ``run.step`` that takes a snapshot: what it looks at,
copies and hashes. The memory copy is of one block, into pages of /dev/shm that were used before, as those of a snapshot are.
``torch.save`` writes to /dev/shm, ``async_save`` stages into memory that it has used before; only what blocks its caller counts.

Before each single measurement the processor's caches are filled with something else, as a training step would do. Each round measures all,
every second one in reverse order, so that drift cancels; a ratio is of two measurements in one round. Storage is a folder in the system's
temporary folder: TMPDIR=... chooses another file system. Needs up to eight times the largest size in memory, most of it in /dev/shm.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from recovery import spread
from states import State, snapshots_of
from systems.system import end_in_order
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from workers.checkpoint.slots import read_header, slot_path
from workers.checkpoint.writer import PIECE, commit, write_share

WARM_UP = 2  # rounds before the first that counts: each of the two slots has its memory then
CACHES = 64 << 20  # bytes, more than the caches of most processors hold
STAGING = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)

Measure = Callable[[], float]  # seconds


class Stalls:
    """The ways to have a copy of one state, all in one folder of /dev/shm."""

    def __init__(self, state: State, step: Callable[[], None], shm: Path) -> None:
        self._state, self._step, self._shm = state, step, shm
        tensors = state.tensors
        self.size, self.arrays = sum(t.nbytes for t in tensors), len(tensors)
        self._source = torch.ones(self.size, dtype=torch.uint8)
        with open(shm / "copy", "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.size)
            self._copy = ctypes.c_char.from_buffer(mmap.mmap(file.fileno(), self.size))
        self._stager = DefaultStager(STAGING)
        self.ways: dict[str, Measure] = {
            "memory copy": self.memory_copy,
            "snapshot": self.snapshot,
            "torch.save": self.torch_save,
            "async_save": self.async_save,
        }

    def memory_copy(self) -> float:
        begun = time.perf_counter()
        ctypes.memmove(ctypes.addressof(self._copy), self._source.data_ptr(), self.size)
        return time.perf_counter() - begun

    def snapshot(self) -> float:
        begun = time.perf_counter()
        self._step()
        return time.perf_counter() - begun

    def torch_save(self) -> float:
        path = self._shm / "saved.pt"
        begun = time.perf_counter()
        torch.save(self._state.tree, path)
        seconds = time.perf_counter() - begun
        path.unlink()
        return seconds

    def async_save(self) -> float:
        path = self._shm / "saved"
        begun = time.perf_counter()
        written = dcp.async_save(self._state.tree, checkpoint_id=path, async_stager=self._stager)
        seconds = time.perf_counter() - begun
        written.result()
        shutil.rmtree(path)
        return seconds


class Writes:
    """The ways to have the newest snapshot of ``shm``, which is pinned, in the folder ``storage``."""

    def __init__(self, shm: Path, storage: Path, step: int) -> None:
        self._shm, self._storage, self._step = shm, storage, step
        path = next(path for path in (slot_path(shm, 0, i) for i in range(2)) if (found := read_header(path)) and found.step == step)
        with open(path, "rb") as file:
            self._data = memoryview(mmap.mmap(file.fileno(), found.end, prot=mmap.PROT_READ))
        self.ways: dict[str, Measure] = {"plain write": self.plain, "checkpoint": self.checkpoint}

    def plain(self) -> float:
        path = self._storage / "plain"
        begun = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for start in range(0, len(self._data), PIECE):
                file.write(self._data[start : start + PIECE])
            os.fsync(file.fileno())
        seconds = time.perf_counter() - begun
        path.unlink()
        return seconds

    def checkpoint(self) -> float:
        url = str(self._storage / "job")
        begun = time.perf_counter()
        share = write_share(self._shm, url, self._step, attempt=0, generation=0, node_index=0, node_count=1, ranks=[0])
        commit(url, "bench", 0, 0, self._step, 1, [share], started_at=begun, now=time.perf_counter())
        seconds = time.perf_counter() - begun
        shutil.rmtree(url)
        return seconds


def in_turns(ways: dict[str, Measure], pairs: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds of each way, in the order of the rounds."""
    caches = np.zeros(CACHES, np.uint8)
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-warm_up, pairs):
        for name in reversed(ways) if turn % 2 else ways:
            caches += 1
            seconds = ways[name]()
            if turn >= 0:
                seen[name].append(seconds)
    return seen


def cells(seen: dict[str, list[float]]) -> str:
    """Milliseconds of each way, and of each but the first how many times the first."""
    (_, first), *others = seen.items()
    told = [spread((s * 1000 for s in first), 2)]
    for _, seconds in others:
        told += [spread((s * 1000 for s in seconds), 2), spread((a / b for a, b in zip(seconds, first, strict=True)), 2)]
    return " | ".join(told)


def measure(megabytes: int | None, pairs: int, shm: Path, storage: Path) -> tuple[str, str]:
    """The rows of both tables."""
    state = State(megabytes)
    with snapshots_of(state, shm) as run:
        stalls = Stalls(state, run.step, shm)
        stalled = in_turns(stalls.ways, pairs, WARM_UP)
    written = in_turns(Writes(shm, storage, run.steps).ways, pairs, 1)
    what = f"{stalls.size / 1e6:.0f} MB in {stalls.arrays} arrays"
    rows = f"| {what} | {cells(stalled)} |", f"| {what} | {cells(written)} |"
    print("\n".join(rows), flush=True)
    return rows


def table(ways: Iterable[str], rows: Iterable[str]) -> str:
    first, *others = ways
    heads = ["", f"{first}, ms", *(head for way in others for head in (f"{way}, ms", f"times {first}"))]
    return "\n".join([f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---" * len(heads) + "|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 100, 500, 2000], help="MB; 0: the state of examples/shakespeare")
    parser.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    end_in_order()
    torch.set_num_threads(1)
    rows = []
    for size in args.sizes:
        with (
            tempfile.TemporaryDirectory(prefix="ks-bench-", dir="/dev/shm") as shm,
            tempfile.TemporaryDirectory(prefix="ks-bench-") as storage,
        ):
            rows.append(measure(size or None, args.pairs, Path(shm), Path(storage)))
    stalls, writes = zip(*rows, strict=True)
    print(f"\nSnapshot; median / min / max of {args.pairs}\n")
    print(table(("memory copy", "snapshot", "torch.save", "async_save"), stalls))
    print("\nCheckpoint in storage\n")
    print(table(("plain write", "checkpoint"), writes))


if __name__ == "__main__":
    main()
