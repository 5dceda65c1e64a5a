"""The restore test finds what would fail a restart, and leaves nothing behind."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workers.checkpoint import trial as trials
from workers.checkpoint.catalog import remove
from workers.checkpoint.damage import change_a_byte
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.checkpoint.trial import first_difference, try_restore
from workers.checkpoint.writer import commit, write_share
from workers.frameworks.plain import random_state


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    """The test sets them, which is why it runs in a process of its own."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])


def own(rank: int, **more: Any) -> dict[str, Any]:
    return {"parts": {"data": rank}, "random": random_state() | {"torch": torch.get_rng_state()} | more}


def save(shm: Path, url: str, step: int, **more: Any) -> str:
    for rank in (0, 1):
        state = {"w": torch.arange(9000.0) * step, "n": np.int64(4)}
        SnapshotWriter(shm, Place(rank, 2, rank, 2, 0), 0 if step == 10 else 10).write(step, state, own(rank, **more), pin=False)
    return commit(url, "job", 1, 0, step, 2, [write_share(shm, url, step, 1, 0, 0, 1, [0, 1])], 1.0, 2.0).url


def left(shm: Path) -> list[str]:
    return [p.name for p in shm.iterdir() if "trial" in p.name]


def test_what_can_be_restored_is_compared_with_its_snapshot(shm: Path, tmp_path: Path) -> None:
    url = save(shm, str(tmp_path), 10)
    found = try_restore(shm, url, 10, [0, 1], 2)
    assert (found.problem, found.skipped, found.compared) == (None, None, True)
    assert left(shm) == []
    for slot in shm.glob("snap-*"):
        slot.unlink()
    assert try_restore(shm, url, 10, [0, 1], 2).compared is False


def test_damage_is_found(shm: Path, tmp_path: Path) -> None:
    url = save(shm, str(tmp_path), 10)
    change_a_byte(url)
    assert "does not match its checksum" in (try_restore(shm, url, 10, [0, 1], 2).problem or "")
    remove(url)
    assert try_restore(shm, url, 10, [0, 1], 2).problem
    assert left(shm) == []


def test_a_checkpoint_that_is_not_the_snapshot_is_told_with_the_place(shm: Path, tmp_path: Path) -> None:
    url = save(shm, str(tmp_path), 10)
    for slot in shm.glob("snap-*"):
        slot.unlink()
    for rank in (0, 1):
        state = {"w": torch.arange(9000.0) * 11, "n": np.int64(4)}
        SnapshotWriter(shm, Place(rank, 2, rank, 2, 0), 0).write(10, state, own(rank), pin=False)
    assert try_restore(shm, url, 10, [0, 1], 2).problem == "rank 0: shared/w is not what the snapshot of step 10 holds"


def test_generators_that_do_not_take_their_state_fail_the_test(shm: Path, tmp_path: Path) -> None:
    url = save(shm, str(tmp_path), 10, torch=torch.zeros(5, dtype=torch.uint8))
    assert "RNG state" in (try_restore(shm, url, 10, [0, 1], 2).problem or "")


def test_it_takes_no_room_from_snapshots(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = save(shm, str(tmp_path), 10)
    free = os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize
    monkeypatch.setattr(trials, "SPARE", free // 36_000)
    assert "bytes free" in (try_restore(shm, url, 10, [0, 1], 2).skipped or "")


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ({"a": np.zeros(3)}, {"a": np.zeros(3)}, None),
        ({"a": np.zeros(3)}, {"a": -np.zeros(3)}, "r/a"),
        ({"a": np.zeros(3)}, {"a": np.zeros(3, np.float32)}, "r/a"),
        ({"a": np.zeros(4)}, {"a": np.zeros((2, 2))}, "r/a"),
        ({"a": torch.zeros(3)}, {"a": np.zeros(3, np.float32)}, "r/a"),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "r"),
        ({"a": 1}, {"a": 1, "b": np.zeros(1)}, "r"),
        ({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([float("nan")])}, None),
    ],
)
def test_trees_differ_by_their_bits(one: Any, other: Any, place: str | None) -> None:
    assert first_difference(one, other, "r") == place
