"""Snapshots in shared memory: what survives a crash, what is found to be damaged, which slot is reused."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workers.checkpoint.copying import Copier
from workers.checkpoint.reader import read_snapshot
from workers.checkpoint.slots import (
    AT_PINNED,
    AT_STATE,
    HEADER,
    WRITING,
    discard_newer,
    holdings,
    open_slot,
    pinned_steps,
    read_header,
    slot_path,
    unpin,
)
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.checkpoint.tree import StateError


def state(step: int, rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    shared = {"model": {"w": torch.full((64, 8), float(step)), "b": torch.full((8,), step, dtype=torch.bfloat16)}, "lr": 0.1 * step}
    return shared, {"parts": {"data": {"sample": step * 10}}, "random": np.full(5, step + rank)}


def writer(shm: Path, rank: int = 0, ranks: int = 1, restored: int = 0) -> SnapshotWriter:
    return SnapshotWriter(shm, Place(rank, ranks, rank, ranks, generation=4), restored)


def steps(shm: Path, ranks: tuple[int, ...] = (0,), verify: bool = True) -> dict[int, bool]:
    return {h.step: h.valid for h in holdings(shm, ranks, verify)}


def check(shm: Path, step: int, ranks: int = 1) -> None:
    for rank in range(ranks):
        found = read_snapshot(shm, rank, range(ranks), step)
        shared, own = state(step, rank)
        assert torch.equal(found.shared["model"]["w"], shared["model"]["w"])
        assert torch.equal(found.shared["model"]["b"], shared["model"]["b"])
        assert found.shared["model"]["b"].dtype is torch.bfloat16
        assert found.shared["lr"] == shared["lr"]
        assert found.own["parts"] == own["parts"]
        assert found.own["random"].tolist() == own["random"].tolist()


def test_two_slots_alternate_and_hold_the_newest_two(shm: Path) -> None:
    snapshots = writer(shm)
    written = [snapshots.write(step, *state(step), pin=False) for step in range(1, 6)]
    assert steps(shm) == {4: True, 5: True}
    assert [w.cold for w in written] == [True, True, False, False, False]  # warm pages are reused
    check(shm, 4)
    check(shm, 5)
    assert not slot_path(shm, 0, 2).exists()


def test_pinned_slot_stays_until_unpinned(shm: Path) -> None:
    snapshots = writer(shm)
    snapshots.write(1, *state(1), pin=True)
    for step in range(2, 7):
        assert not snapshots.write(step, *state(step), pin=step == 3).pinned  # an older one is still pinned
    assert pinned_steps(shm, [0, 1]) == {0: 1, 1: None}
    assert steps(shm) == {1: True, 5: True, 6: True}
    unpin(shm, [0], 5)
    assert pinned_steps(shm, [0]) == {0: 1}
    unpin(shm, [0], 1)
    assert snapshots.write(7, *state(7), pin=True).pinned
    assert pinned_steps(shm, [0]) == {0: 7}
    assert steps(shm) == {5: True, 6: True, 7: True}


def test_local_ranks_hold_one_replica_together(shm: Path) -> None:
    for rank in range(3):
        writer(shm, rank, 3).write(5, *state(5, rank), pin=False)
    check(shm, 5, ranks=3)
    sizes = [h.bytes for h in holdings(shm, [0, 1, 2], verify=False)]
    assert max(sizes) > 64 * 8 * 4  # one holds the matrix
    assert sorted(sizes)[1] < 64 * 8 * 4  # the others do not
    slot_path(shm, 1, 0).unlink()
    with pytest.raises(StateError, match="no complete snapshot of rank 1 at step 5"):
        read_snapshot(shm, 0, range(3), 5)


def test_killed_in_mid_copy(shm: Path) -> None:
    """A real process is killed between the first and the last byte of a slot."""
    writer(shm).write(1, *state(1), pin=False)
    started, told = os.pipe()
    child = os.fork()
    if child == 0:
        snapshots = writer(shm, restored=1)
        copy = Copier.copy

        def stuck(self: Copier, arrays: Any) -> Any:
            copy(self, arrays)
            os.write(told, b"x")
            signal.pause()

        Copier.copy = stuck  # type: ignore[method-assign]
        snapshots.write(2, *state(2), pin=False)
        os._exit(1)
    os.read(started, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    header = read_header(slot_path(shm, 0, 1))
    assert header is not None
    assert (header.state, header.step) == (WRITING, 2)
    assert steps(shm) == {1: True}
    check(shm, 1)
    after = writer(shm, restored=1)  # the next generation writes over the torn slot, not over the good one
    after.write(2, *state(2), pin=False)
    assert steps(shm) == {1: True, 2: True}


def test_newer_than_the_restored_step_is_void(shm: Path) -> None:
    snapshots = writer(shm)
    for step in (1, 2):
        snapshots.write(step, *state(step), pin=step == 2)
    discard_newer(shm, [0], 1)
    assert steps(shm) == {1: True}
    assert pinned_steps(shm, [0]) == {0: None}
    after = writer(shm, restored=1)
    after.write(2, *state(2), pin=False)
    assert steps(shm) == {1: True, 2: True}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("part", ["shared", "own"])
def test_flipped_byte_is_found_in_its_part(shm: Path, part: str, place: int) -> None:
    """In the arrays and in the description of each part; the other part still serves."""
    writer(shm).write(1, *state(1), pin=False)
    path = slot_path(shm, 0, 0)
    header = read_header(path)
    assert header is not None
    section = (header.shared_sections() if part == "shared" else header.own_sections())[place]
    for at in (section.start, (section.start + section.stop) // 2, section.stop - 1):
        flip(path, at)
        (holding,) = holdings(shm, [0], verify=True)
        assert (holding.valid, holding.shared_valid, holding.own_valid) == (False, part == "own", part == "shared")
        assert f"checksum of the {part} part of step 1" in (holding.problem or "")
        assert steps(shm, verify=False) == {1: True}
        flip(path, at)
    assert steps(shm) == {1: True}


def test_flipped_byte_of_the_header_is_found(shm: Path) -> None:
    """No byte of it gives the bytes of one step out as another's; only the pin may differ."""
    snapshots = writer(shm)
    for step in (1, 2):
        snapshots.write(step, *state(step), pin=False)
    path = slot_path(shm, 0, 1)
    sound = path.read_bytes()
    for at in range(len(snapshots._slots[1].header.pack())):
        flip(path, at)
        found = [(h.step, h.valid) for h in holdings(shm, [0], verify=False)]
        assert found[0] == (1, True)
        assert [f for f in found[1:] if f[1]] == ([(2, True)] if AT_PINNED <= at < AT_PINNED + 4 else [])
        after = writer(shm, restored=1)
        after.write(2, *state(2), pin=False)
        assert steps(shm) == {1: True, 2: True}
        path.write_bytes(sound)


@pytest.mark.parametrize("size", [0, 100, HEADER, HEADER + 600])
def test_truncated_slot(shm: Path, size: int) -> None:
    snapshots = writer(shm)
    for step in (1, 2):
        snapshots.write(step, *state(step), pin=False)
    os.truncate(slot_path(shm, 0, 1), size)
    found = steps(shm)
    assert found.pop(1)
    assert found in ({}, {2: False})


def test_layout_may_change(shm: Path) -> None:
    snapshots = writer(shm)
    snapshots.write(1, {"a": np.arange(4)}, {}, pin=False)
    snapshots.write(2, {"a": np.arange(300_000), "b": np.float32(1)}, {}, pin=False)
    snapshots.write(3, {"a": np.arange(2, dtype=np.int8)}, {"x": 1}, pin=False)
    assert read_snapshot(shm, 0, [0], 2).shared["a"].tolist() == list(range(300_000))
    found = read_snapshot(shm, 0, [0], 3)
    assert (found.shared["a"].tolist(), found.own) == ([0, 1], {"x": 1})


def test_overwritten_while_read_is_refused(shm: Path) -> None:
    snapshots = writer(shm)
    snapshots.write(1, *state(1), pin=False)
    reading = open_slot(shm, 0, 1)
    reading.__enter__()
    for step in (2, 3):
        snapshots.write(step, *state(step), pin=False)
    with pytest.raises(StateError, match="overwritten while it was read"):
        reading.__exit__(None, None, None)


def test_foreign_files_are_no_slots(shm: Path) -> None:
    slot_path(shm, 0, 0).write_bytes(b"x" * 5000)
    slot_path(shm, 0, 1).write_bytes(struct.pack("<8sI", b"KEEPSNAP", 99) + b"\0" * 100)
    assert holdings(shm, [0, 7], verify=True) == []
    assert AT_STATE == 12


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))
