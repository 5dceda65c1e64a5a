"""A run that was killed and restored ends with the bits of the unbroken one: real processes, gloo, TensorFlow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from group import Group, alone

from workers.board import Board
from workers.checkpoint.catalog import stage
from workers.checkpoint.slots import holdings, pinned_steps
from workers.checkpoint.writer import commit, write_share
from workers.messages import RankPhase


@pytest.fixture
def groups(shm: Path) -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.end()


def result(output: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key} {rest}" for key, rest in output.items() if key.startswith("weights="))


def steps(output: dict[str, str]) -> dict[str, str]:
    return {key: rest for key, rest in output.items() if key.startswith("step=")}


def complete(shm: Path, ranks: int) -> int:
    """The newest step that every rank holds whole."""
    found = [{h.step for h in holdings(shm, [rank], verify=True) if h.valid} for rank in range(ranks)]
    return max(set.intersection(*found))


def test_torch_killed_twice(shm: Path, groups: list[Group], tmp_path: Path) -> None:
    straight = alone("train_torch.py", "12", cwd=tmp_path)
    assert not list(tmp_path.iterdir())  # alone it leaves nothing behind
    group = Group(shm, 1, KEEPSTEP_EVERY_STEPS="5")
    groups.append(group)

    group.start("train_torch.py", "12", "kill:0:7")
    (first,) = group.wait([-9])
    assert "restored=0" in first
    assert pinned_steps(shm, [0]) == {0: 5}
    share = write_share(shm, str(tmp_path), 5, 1, 0, 0, 1, [0])
    record = commit(str(tmp_path), "job", 1, 0, 5, 1, [share], 0.0, 1.0)

    assert complete(shm, 1) == 7
    group.start("train_torch.py", "12", "kill:0:9", restore={"step": 7, "source": "memory", "staged": None})
    (second,) = group.wait([-9])
    assert second["restored=7"] == "source=memory"
    board = Board.open(shm / "board-0").read()
    assert (board.restored, board.step, board.attached) == (7, 9, True)

    assert stage(record.url, shm, "staged", [0], 1) is None
    group.start("train_torch.py", "12", restore={"step": 5, "source": "storage", "staged": "staged"})
    (third,) = group.wait([0])
    assert third["restored=5"] == "source=storage"
    assert result(third) == result(straight)
    assert steps(first) | steps(second) | steps(third) == steps(straight)
    for output in (first, second, third):  # nothing differed on the way either
        assert steps(output).items() <= steps(straight).items()
    assert Board.open(shm / "board-0").read().phase is RankPhase.DONE


def test_two_ranks_with_gloo(shm: Path, groups: list[Group], tmp_path: Path) -> None:
    plain = tmp_path / "straight"
    plain.mkdir()
    group = Group(plain, 2)
    groups.append(group)
    group.start("train_torch.py", "9")
    straight = group.wait([0, 0])
    assert straight[0].keys() != straight[1].keys()  # other random numbers, other batch norm statistics

    group = Group(shm, 2)
    groups.append(group)
    group.start("train_torch.py", "9", "kill:1:5")
    group.processes[1].wait(60)
    group.processes[0].kill()
    broken = group.wait([-9, -9])
    step = complete(shm, 2)
    assert step == 5
    group.start("train_torch.py", "9", restore={"step": step, "source": "memory", "staged": None})
    resumed = group.wait([0, 0])
    for rank in range(2):
        assert result(resumed[rank]) == result(straight[rank])
        assert steps(broken[rank]) | steps(resumed[rank]) == steps(straight[rank])
    assert {h.step for h in holdings(shm, [0, 1], verify=True) if h.valid} >= {9}


def test_sigterm_ends_both_ranks_after_the_same_step_with_a_last_snapshot(shm: Path, groups: list[Group]) -> None:
    group = Group(shm, 2, KEEPSTEP_SNAPSHOT_EVERY="100")
    groups.append(group)
    group.start("train_torch.py", "100000")
    boards = []
    for rank, process in enumerate(group.processes):
        assert process.stdout is not None
        while "step=3 " not in process.stdout.readline():
            pass
        boards.append(Board.open(shm / f"board-{rank}"))
    group.processes[1].send_signal(signal.SIGTERM)
    for _ in range(5):
        group.processes[0].stdout.readline()  # type: ignore[union-attr]
    group.processes[0].send_signal(signal.SIGTERM)
    group.wait([0, 0])
    last = boards[0].read().step
    assert boards[1].read().step == last
    assert pinned_steps(shm, [0, 1]) == {0: last, 1: last}
    assert complete(shm, 2) == last


def test_an_exception_keeps_the_last_good_snapshot(shm: Path, groups: list[Group]) -> None:
    group = Group(shm, 1, KEEPSTEP_SNAPSHOT_EVERY="4")
    groups.append(group)
    group.start("train_torch.py", "12", "raise:0:6")
    group.wait([1])
    assert complete(shm, 1) == 4  # the state at an exception may be half a step
    group.start("train_torch.py", "6", restore={"step": 4, "source": "memory", "staged": None})
    group.wait([0])
    assert complete(shm, 1) == 6
    assert pinned_steps(shm, [0]) == {0: 6}


def test_a_checkpoint_request_pins_that_step(shm: Path, groups: list[Group]) -> None:
    group = Group(shm, 1, KEEPSTEP_SNAPSHOT_EVERY="100")
    groups.append(group)
    group.start("train_torch.py", "8", "pause")
    process = group.processes[0]
    assert process.stdout is not None
    assert process.stdin is not None
    while "step=1 " not in process.stdout.readline():
        pass
    Board.open(shm / "board-0").checkpoint_request = 3
    process.stdin.write("\n" * 7)
    group.wait([0])
    assert pinned_steps(shm, [0]) == {0: 3}
    assert {h.step for h in holdings(shm, [0], verify=True)} == {3, 8}


@pytest.mark.parametrize("way", ["script", "callback"])
def test_keras_in_the_middle_of_an_epoch(shm: Path, groups: list[Group], tmp_path: Path, way: str) -> None:
    group = Group(shm, 1, KEEPSTEP_FRAMEWORK="tensorflow", KEEPSTEP_STRATEGY="mirrored", KEEPSTEP_DEVICES="2")
    groups.append(group)
    group.start("train_keras.py", "3", way)
    (straight,) = group.wait([0])
    assert len(steps(straight)) == 21
    group.start("train_keras.py", "3", way, "kill:10")
    (broken,) = group.wait([-9])
    assert complete(shm, 1) == 10
    group.start("train_keras.py", "3", way, restore={"step": 10, "source": "memory", "staged": None})
    (resumed,) = group.wait([0])
    assert list(steps(resumed)) == [f"step={n}" for n in range(11, 22)]
    assert steps(broken) | steps(resumed) == steps(straight)
    assert result(resumed) == result(straight)
