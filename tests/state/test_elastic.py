"""Sharded state on the same and on another number of ranks: what is gathered after the restore has the bits of what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm import Warm

from workers.checkpoint.catalog import stage
from workers.checkpoint.writer import commit, write_share


def checkpoint(shm: Path, storage: Path, step: int, ranks: int) -> str:
    share = write_share(shm, str(storage), step, 1, 0, 0, 1, list(range(ranks)))
    return commit(str(storage), "job", 1, 0, step, ranks, [share], 0.0, 1.0).url


def staged(shm: Path, url: str, ranks: int) -> tuple[Path, dict[str, Any]]:
    """A node's memory for that many ranks, with the checkpoint in it."""
    folder = shm / f"for-{ranks}"
    folder.mkdir()
    assert stage(url, folder, "staged", list(range(ranks)), ranks) is None
    return folder, {"step": 3, "source": "storage", "staged": "staged"}


def samples(outputs: list[dict[str, str]], step: int) -> list[int]:
    return sorted(n for output in outputs for n in json.loads(output[f"step={step}"].split("samples=")[1]))


@pytest.mark.parametrize("way", ["fsdp", "zero"])
def test_two_ranks_go_on_as_two_one_and_three(warm: Warm, shm: Path, tmp_path: Path, way: str) -> None:
    command = f"train_sharded.py STEPS {way} elastic"
    straight = warm.run(None, 2, command.replace("STEPS", "5"), [0, 0])
    warm.run(shm, 2, command.replace("STEPS", "3"), [0, 0])
    state = straight[0]["step=3"].split()[0].removeprefix("state=")

    again = warm.run(shm, 2, command.replace("STEPS", "5"), [0, 0], {"step": 3, "source": "memory", "staged": None})
    assert [output["step=5"] for output in again] == [output["step=5"] for output in straight]

    url = checkpoint(shm, tmp_path, 3, 2)
    for ranks in (1, 3):
        folder, restore = staged(shm, url, ranks)
        outputs = warm.run(folder, ranks, command.replace("STEPS", "5"), [0] * ranks, restore)
        assert outputs[0]["restored=3"] == f"found={state}"
        for step in (4, 5):
            assert samples(outputs, step) == samples(straight, step)
        drawn = [json.loads(output["draws="]) for output in outputs]
        assert drawn[:2] == [json.loads(output["draws="]) for output in again][:ranks]
        for other in drawn[2:]:  # equal where all ranks were equal, else of its own
            assert [other[name] == drawn[0][name] for name in ("numpy", "same")] == [True, True]
            assert not any(other[name] in (drawn[0][name], drawn[1][name]) for name in ("python", "torch", "draw"))
        told = [line for rank in range(ranks) for line in warm.text(rank).splitlines() if line.startswith("keepstep:")]
        assert told == [f"keepstep: step 3 of 2 ranks goes on with {ranks}; " + DERIVED[ranks]]


DERIVED = {1: "nothing is derived", 3: "random generators of ranks from 2 on are derived: draw, python, torch"}


@pytest.mark.slow
def test_a_whole_model_is_cut_and_shards_become_whole(warm: Warm, shm: Path, tmp_path: Path) -> None:
    """One rank without sharding to two with it, and back."""
    (first,) = warm.run(shm, 1, "train_sharded.py 3 plain elastic", [0])
    folder, restore = staged(shm, checkpoint(shm, tmp_path / "whole", 3, 1), 2)
    cut = warm.run(folder, 2, "train_sharded.py 4 fsdp elastic", [0, 0], restore)
    assert cut[0]["restored=3"] == "found=" + first["step=3"].split()[0].removeprefix("state=")
    folder, restore = staged(shm, checkpoint(folder, tmp_path / "cut", 4, 2), 1)
    (last,) = warm.run(folder, 1, "train_sharded.py 4 plain elastic", [0], restore)
    assert last["restored=4"] == "found=" + cut[0]["step=4"].split()[0].removeprefix("state=")


def test_without_consent_or_with_a_part_of_its_own_it_is_refused(warm: Warm, shm: Path, tmp_path: Path) -> None:
    warm.run(shm, 2, "train_sharded.py 3 zero", [0, 0])
    url = checkpoint(shm, tmp_path / "silent", 3, 2)
    words = "it was written by 2 ranks and this group has 3; run it with 2 ranks, or let its script say run.restore(..., elastic=True)"
    assert str(stage(url, shm, "staged", [0, 1, 2], 3)) == words

    warm.run(shm, 2, "train_sharded.py 3 zero elastic drift", [0, 0])
    folder, restore = staged(shm, checkpoint(shm, tmp_path / "agreed", 3, 2), 1)
    for words, message in (
        (
            "drift",
            "restore: 2 ranks saved the state of step 3 and this group has 1; run it with 2 ranks, or say run.restore(..., elastic=True)",
        ),
        ("elastic drift", "restore: step 3, 2 ranks to 1: state at notes/seen/0 differs between the ranks that saved it"),
    ):
        warm.run(folder, 1, f"train_sharded.py 3 zero {words}", [1], restore)
        assert message in warm.text(0)


@pytest.mark.slow
def test_gradients_of_shards_in_an_open_window(warm: Warm, shm: Path, tmp_path: Path) -> None:
    command = "train_sharded.py STEPS fsdp elastic window"
    straight = warm.run(None, 2, command.replace("STEPS", "4"), [0, 0])
    warm.run(shm, 2, command.replace("STEPS", "3"), [0, 0])
    again = warm.run(shm, 2, command.replace("STEPS", "4"), [0, 0], {"step": 3, "source": "memory", "staged": None})
    assert [output["step=4"] for output in again] == [output["step=4"] for output in straight]
    warm.run(shm, 2, command.replace("STEPS", "3"), [0, 0])
    folder, restore = staged(shm, checkpoint(shm, tmp_path, 3, 2), 1)
    warm.run(folder, 1, command.replace("STEPS", "4"), [1], restore)
    assert "step 3, 2 ranks to 1: it was saved in the middle of an accumulation window, whose gradients belong to 2 ranks" in warm.text(0)


def test_gradients_that_cannot_be_had_are_refused_at_the_first_step(warm: Warm, shm: Path) -> None:
    warm.run(shm, 1, "train_sharded.py 2 fsdp window unsynced", [1])
    assert "step: model has set_requires_gradient_sync(False)" in warm.text(0)
