"""What real training scripts hold goes on bit for bit: accumulation windows, scaler, EMA, loaders with workers. Real ranks, gloo."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from warm import Warm

from workers.checkpoint.slots import holdings


def complete(shm: Path, ranks: int) -> int:
    found = [{h.step for h in holdings(shm, [rank], verify=True) if h.valid} for rank in range(ranks)]
    return max(set.intersection(*found))


def trained(output: dict[str, str]) -> dict[str, str]:
    return {key: rest for key, rest in output.items() if key.startswith(("step=", "weights="))}


def broken_and_unbroken(warm: Warm, shm: Path, ranks: int, steps: int, program: str, kills: dict[int, int], **variables: str) -> Any:
    """Runs with a kill after each step of ``kills``, which says where training then goes on; asserts that all lines are those of the
    unbroken run, which are given."""
    command = program.replace("STEPS", str(steps))
    straight = [trained(output) for output in warm.run(None, ranks, command, [0] * ranks)]
    restore = None
    for kill, resumed in kills.items():
        broken = warm.run(shm, ranks, f"{command} kill:{ranks - 1}:{kill}", [-9] * ranks, restore, **variables)
        for rank in range(ranks):
            assert f"step={kill}" in broken[rank]
            assert trained(broken[rank]).items() <= straight[rank].items()
        assert complete(shm, ranks) == resumed
        restore = {"step": resumed, "source": "memory", "staged": None}
    ended = warm.run(shm, ranks, command, [0] * ranks, restore, **variables)
    for rank in range(ranks):
        rest = {key: text for key, text in straight[rank].items() if not key.startswith("step=") or int(key[5:]) > resumed}
        assert trained(ended[rank]) == rest
    return straight


def test_accumulation_windows_with_a_step_per_micro_batch(warm: Warm, shm: Path) -> None:
    straight = broken_and_unbroken(warm, shm, 2, 8, "train_parts.py STEPS micro workers", {4: 4, 5: 5})
    assert len({rest.split("scale=")[1].split()[0] for key, rest in straight[0].items() if key.startswith("step=")}) > 1


def test_accumulation_windows_with_a_step_per_window(warm: Warm, shm: Path) -> None:
    broken_and_unbroken(warm, shm, 2, 4, "train_parts.py STEPS window batches", {2: 2})


def test_ranks_that_are_adrift_in_a_window_keep_a_step_in_common(warm: Warm, shm: Path) -> None:
    """A pinned step in the middle of a window goes on there, with the gradients; other kills at the end of the window before."""
    broken_and_unbroken(warm, shm, 2, 9, "train_parts.py STEPS adrift batches", {4: 4, 7: 6}, KEEPSTEP_EVERY_STEPS="4")


@pytest.mark.parametrize("loader", ["stateful", "workers"])
def test_three_epochs_with_kills_train_on_each_sample_as_often_as_without(warm: Warm, shm: Path, loader: str) -> None:
    """Kills in the middle of an epoch, at its end and at the first step of the next; prefetched batches do not count."""
    steps, kills = (33, [7, 11, 12]) if loader == "stateful" else (18, [2, 6, 7])
    (straight,) = broken_and_unbroken(warm, shm, 1, steps, f"train_parts.py STEPS micro {loader}", {kill: kill for kill in kills})
    samples = [json.loads(rest.split("samples=")[1]) for key, rest in straight.items() if key.startswith("step=")]
    per_epoch = steps // 3
    for epoch in range(3):
        counted = Counter(n for batch in samples[epoch * per_epoch : (epoch + 1) * per_epoch] for n in batch)
        assert set(counted.values()) == {1}
        assert len(counted) in (44, 47)
    assert samples[:per_epoch] != samples[per_epoch : 2 * per_epoch]


def test_buckets_of_three_ranks_keep_their_order(warm: Warm, shm: Path) -> None:
    """The order of additions changes the last bits."""
    (straight, *_) = warm.run(None, 3, "train_order.py 5", [0] * 3)
    warm.run(shm, 3, "train_order.py 2", [0] * 3)
    resumed = warm.run(shm, 3, "train_order.py 5", [0] * 3, {"step": 2, "source": "memory", "staged": None})
    assert [trained(output) for output in resumed] == [{f"step={n}": straight[f"step={n}"] for n in (3, 4, 5)}] * 3
