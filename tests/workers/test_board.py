"""The board: what a rank shows is what the agent reads, also while it is being written and after the rank is gone."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import board as layout
from workers.board import RING, SIZE, Board
from workers.messages import RankPhase


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board-0"


@pytest.fixture
def board(path: Path) -> Iterator[Board]:
    made = Board.create(path, 3, 4711)
    yield made
    made.close()


def test_a_fresh_board(board: Board, path: Path) -> None:
    seen = Board.open(path).read()
    assert (seen.generation, seen.pid, seen.phase, seen.step, seen.steps, seen.metrics) == (3, 4711, RankPhase.START, 0, (), {})
    assert (seen.step_at, seen.first_step_at, seen.restored_at, seen.failed_at, seen.restored, seen.attached) == (
        None,
        None,
        None,
        None,
        0,
        False,
    )
    assert seen.started_at == seen.phase_at == pytest.approx(time.time(), abs=5)
    assert path.stat().st_size == SIZE
    assert [file.name for file in path.parent.iterdir()] == ["board-0"]


def test_round_trip(board: Board, path: Path) -> None:
    board.attach()
    board.restored(40)
    board.phase(RankPhase.EVAL)
    board.finish_step(41, 1000.25)
    board.finish_step(42, 1000.5)
    board.metrics({"loss": 0.5, "lr": 1e-3})
    board.failed()
    seen = Board.open(path).read()
    assert (seen.attached, seen.restored, seen.phase, seen.step, seen.step_at) == (True, 40, RankPhase.EVAL, 42, 1000.5)
    assert (seen.steps, seen.first_step_at, seen.metrics) == (((41, 1000.25), (42, 1000.5)), 1000.25, {"loss": 0.5, "lr": 1e-3})
    assert seen.restored_at is not None
    assert seen.failed_at is not None
    assert seen.restored_at <= seen.phase_at <= seen.failed_at


@pytest.mark.parametrize("phase", list(RankPhase))
def test_every_phase_can_be_shown(board: Board, path: Path, phase: RankPhase) -> None:
    board.phase(phase)
    assert Board.open(path).read().phase is phase


def test_starting_from_nothing_is_a_restore_of_step_zero(board: Board) -> None:
    board.restored(0)
    seen = board.read()
    assert (seen.restored, seen.restored_at is not None) == (0, True)


@pytest.mark.parametrize("steps", [1, RING - 1, RING, RING + 1, 5 * RING + 7])
def test_the_ring_keeps_the_newest_steps_in_order(board: Board, steps: int) -> None:
    for step in range(1, steps + 1):
        board.finish_step(step, 1000.0 + step)
    seen = board.read()
    assert seen.steps == tuple((s, 1000.0 + s) for s in range(max(1, steps - RING + 1), steps + 1))
    assert (seen.step, seen.first_step_at) == (steps, 1001.0)


def test_a_step_that_is_half_written_is_not_seen(board: Board) -> None:
    """Its time is written before its number counts."""
    board.finish_step(7, 1007.0)
    layout._STEP.pack_into(board._memory, layout._AT_RING + 8 * layout._STEP.size, 8, 1008.0, 0.0)
    assert (board.read().step, board.read().steps) == (7, ((7, 1007.0),))


def test_names_of_metrics_come_as_text_that_every_encoder_takes(board: Board) -> None:
    board.metrics({"loß\udcff": 1.0})
    assert board.read().metrics == {"loß?": 1.0}


def test_torn_metrics_are_dropped(board: Board) -> None:
    board.metrics({"loss": 1.0})
    sequence = struct.unpack_from("<Q", board._memory, layout._AT_METRICS)[0]
    struct.pack_into("<Q", board._memory, layout._AT_METRICS, sequence + 1)
    assert board.read().metrics == {}
    struct.pack_into("<Q", board._memory, layout._AT_METRICS, sequence + 2)
    assert board.read().metrics == {"loss": 1.0}


def test_metrics_that_change_while_they_are_read_are_dropped(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.metrics({"loss": 1.0})
    get = board._get
    read: list[int] = []

    def slow(at: int) -> int:
        if at == layout._AT_METRICS and read.count(at) == 1:
            read.append(at)
            board.metrics({"loss": 2.0})
        read.append(at)
        return get(at)

    monkeypatch.setattr(board, "_get", slow)
    assert board._read_metrics() == ({}, {})


def test_too_many_metrics_are_refused_with_the_limit(board: Board) -> None:
    room = layout._METRICS_ROOM
    overhead = len(json.dumps([{"": 1.0}, {}]))
    board.metrics({"k" * (room - overhead): 1.0})
    assert list(board.read().metrics.values()) == [1.0]
    with pytest.raises(ValueError, match=f"metrics: {room + 1} bytes of JSON, the limit is {room}; report fewer values"):
        board.metrics({"k" * (room - overhead + 1): 1.0})
    assert list(board.read().metrics.values()) == [1.0]


def test_the_agent_asks_for_a_checkpoint(board: Board, path: Path) -> None:
    assert board.checkpoint_request == 0
    Board.open(path).checkpoint_request = 50
    assert board.checkpoint_request == 50


def test_a_new_board_does_not_disturb_the_reader_of_the_old_one(board: Board, path: Path) -> None:
    board.finish_step(1, 1001.0)
    reader = Board.open(path)
    Board.create(path, 4, 4712).finish_step(9, 1009.0)
    assert (reader.read().generation, reader.read().step) == (3, 1)
    assert (Board.open(path).read().generation, Board.open(path).read().step) == (4, 9)


@pytest.mark.parametrize(("content", "words"), [(b"", "wrong size"), (b"x" * (SIZE - 1), "wrong size"), (b"x" * SIZE, "wrong mark")])
def test_other_files_are_no_boards(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        Board.open(path)


def test_no_board_yet(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Board.open(path)


def test_the_board_outlives_a_killed_rank(path: Path) -> None:
    script = (
        "import os, sys, pathlib; from workers.board import Board; b = Board.create(pathlib.Path(sys.argv[1]), 1, os.getpid());"
        "b.finish_step(12, 1012.0); b.metrics({'loss': 3.0}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -9
    seen = Board.open(path).read()
    assert (seen.step, seen.step_at, seen.metrics) == (12, 1012.0, {"loss": 3.0})


def test_the_time_between_steps_leaves_announced_phases_out(board: Board) -> None:
    for step, at, phases_s in ((1, 1000.0, 0.0), (2, 1000.5, 0.0), (3, 1031.0, 30.0), (4, 1031.5, 0.0)):
        board.finish_step(step, at, phases_s)
    assert board.read().gaps == (0.5, 0.5, 0.5)


def test_metrics_that_are_not_finite_are_told_with_their_first_step(board: Board) -> None:
    board.metrics({"loss": float("nan"), "norm": float("inf")}, {"loss": 15, "norm": 16}, since=15)
    seen = board.read()
    assert math.isnan(seen.metrics["loss"])
    assert seen.metrics["norm"] == math.inf
    assert (seen.nonfinite, seen.nonfinite_since) == ({"loss": 15, "norm": 16}, 15)
    board.metrics({"loss": 1.0}, {"loss": 15, "norm": 16})
    assert (board.read().nonfinite, board.read().nonfinite_since) == ({"loss": 15, "norm": 16}, 0)


@pytest.mark.parametrize("at", [layout._AT_PHASE, layout._AT_STEP, layout._AT_RESTORED, layout._AT_PHASE_AT, layout._AT_NONFINITE])
def test_what_no_rank_writes_is_an_error_of_one_kind(board: Board, at: int) -> None:
    board.finish_step(3, 1000.0)
    board._memory[at : at + 8] = b"\xff" * 8
    with pytest.raises(ValueError, match=r"is no|no phase"):
        board.read()


def test_random_bytes_raise_nothing_else(board: Board) -> None:
    for seed in range(200):
        board._memory[8:SIZE] = random.Random(seed).randbytes(SIZE - 8)
        with contextlib.suppress(ValueError):
            board.read()
