"""Too little memory costs snapshots, never training: what is still taken, what is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.board import Board
from workers.checkpoint import room
from workers.checkpoint.admission import MARGIN, notes, slots_that_fit
from workers.checkpoint.slots import holdings, pinned_steps, slot_path, unpin
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.environment import read_environment
from workers.frameworks.plain import Plain
from workers.run import Run

STATE = {"w": np.zeros(100_000)}
SLOT = 884_736  # bytes of one slot of it
Leave = Callable[[float], None]


@pytest.fixture
def leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leave:
    """The machine has room for so many slots more, whatever it really has."""

    def left(slots: float) -> None:
        (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {int(slots * SLOT * MARGIN) // 1024 + 1} kB\n")
        monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")

    return left


def steps(shm: Path) -> list[int]:
    return sorted(h.step for h in holdings(shm, [0], verify=True) if h.valid)


def write(writer: SnapshotWriter, step: int, pin: bool = False, state: Any = STATE) -> bool:
    return writer.write(step, {}, state, pin) is not None


def test_room_is_asked_for_all_ranks_of_the_node_and_counts_what_they_hold(shm: Path, leave: Leave) -> None:
    leave(6)
    assert [slots_that_fit(shm, SLOT, ranks) for ranks in (1, 2, 3, 7)] == [3, 3, 2, 0]
    slot_path(shm, 5, 0).write_bytes(bytes(SLOT))
    assert [slots_that_fit(shm, SLOT, ranks) for ranks in (2, 3, 7)] == [3, 2, 1]


def test_with_two_slots_a_pinned_one_pauses_snapshots(shm: Path, leave: Leave) -> None:
    leave(2)
    writer = SnapshotWriter(shm, Place(0, 1, 0, 1, 0), 0)
    assert [write(writer, 1), write(writer, 2, pin=True), write(writer, 3)] == [True, True, True]
    assert writer.limit == 2
    assert not writer.takes(pin=True)
    assert not write(writer, 4)
    assert steps(shm) == [2, 3]
    unpin(shm, [0], 2)
    assert write(writer, 5)
    assert steps(shm) == [3, 5]
    assert not slot_path(shm, 0, 2).exists()


def test_memory_that_went_elsewhere_is_noticed_before_the_third_slot(shm: Path, leave: Leave) -> None:
    leave(3)
    writer = SnapshotWriter(shm, Place(0, 1, 0, 1, 0), 0)
    assert write(writer, 1, pin=True)
    assert write(writer, 2)
    leave(0.5)
    assert not write(writer, 3)
    assert (writer.limit, steps(shm)) == (2, [1, 2])


def test_with_one_slot_it_serves_checkpoints_only(shm: Path, leave: Leave) -> None:
    leave(1)
    writer = SnapshotWriter(shm, Place(0, 1, 0, 1, 0), 0)
    assert [write(writer, step, pin=step in (3, 4, 5)) for step in range(1, 7)] == [True, False, True, False, False, False]
    assert pinned_steps(shm, [0]) == {0: 3}
    unpin(shm, [0], 3)
    assert write(writer, 7, pin=True)
    assert steps(shm) == [7]


def test_a_state_that_grows_gives_back_what_does_not_fit_any_more(shm: Path, leave: Leave) -> None:
    leave(2.2)
    writer = SnapshotWriter(shm, Place(0, 1, 0, 1, 0), 0)
    assert write(writer, 1)
    assert write(writer, 2)
    leave(0.2)
    large = {"w": np.zeros(150_000)}
    assert not write(writer, 3, state=large)  # the newest is all that is left
    assert steps(shm) == [2]
    assert write(writer, 4, pin=True, state=large)
    assert (writer.limit, steps(shm)) == (1, [4])
    assert sum(entry.stat().st_size for entry in os.scandir(shm)) <= 2.2 * SLOT


def run(shm: Path, **variables: str) -> Run:
    Board.create(shm / "board-0", 0, 0)
    found = Run(read_environment({"KEEPSTEP_SHM": str(shm), "KEEPSTEP_SNAPSHOT_EVERY": "1"} | variables), Plain())
    found.restore(state=STATE)
    return found


@pytest.mark.parametrize(("slots", "words"), [(2, "while a checkpoint is written"), (1, "for checkpoints only"), (0, "no checkpoints")])
def test_it_is_told_once_and_training_goes_on(shm: Path, leave: Leave, capsys: pytest.CaptureFixture[str], slots: int, words: str) -> None:
    leave(slots)
    training = run(shm)
    for _ in range(4):
        training.step()
    error = capsys.readouterr().err
    assert error.count("keepstep: ") == 1
    assert words in error
    assert "enlarge shared memory" in error
    told = notes(shm, frozenset())
    assert list(told) == [slots]
    assert told[slots][0] == 0
    assert f"keepstep: {told[slots][1]}\n" == error
    assert notes(shm, frozenset(told)) == {}
    assert len(steps(shm)) == slots


def test_with_one_slot_the_last_step_still_becomes_the_final_checkpoint(shm: Path, leave: Leave) -> None:
    leave(1)
    training = run(shm, KEEPSTEP_EVERY_STEPS="3")
    for step in range(1, 6):
        training.step()
        if step == 3:
            assert pinned_steps(shm, [0]) == {0: 3}
            unpin(shm, [0], 3)
    training.finish()
    assert pinned_steps(shm, [0]) == {0: 5}
    assert steps(shm) == [5]


def test_two_ranks_tell_it_once(shm: Path) -> None:
    from workers.checkpoint.admission import leave_note

    leave_note(shm, 1, 2, "first")
    leave_note(shm, 0, 2, "second")
    assert notes(shm, frozenset()) == {2: (1, "first")}
    assert [path.name for path in shm.iterdir()] == ["degraded-2"]
