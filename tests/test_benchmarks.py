"""What the benchmarks make of the ranks' logs, and that those without a cluster run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
OLD, NEW = 11, 22


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__("kills")


@pytest.fixture
def goodput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__("goodput")


def test_cost_of_a_kill(kills: ModuleType) -> None:
    before = [kills.Step(1.0, 1, OLD), kills.Step(2.0, 2, OLD)]
    assert kills.cost([*before, kills.Step(4.0, 3, NEW)], at=2.5) == (1.5, 0)
    survivor = kills.Step(2.6, 3, OLD)  # logged after the kill of another rank: known, and so not new when it is done again
    assert kills.cost([*before, survivor], at=2.5) is None
    assert kills.cost([*before, survivor, kills.Step(4.0, 3, NEW)], at=2.5) is None
    assert kills.cost([*before, survivor, kills.Step(4.0, 3, NEW), kills.Step(5.0, 4, NEW)], at=2.5) == (2.5, 1)


def test_cost_counts_what_a_second_failure_repeats(kills: ModuleType) -> None:
    steps = [kills.Step(1.0, 5, OLD), kills.Step(3.0, 5, NEW), kills.Step(5.0, 5, 33), kills.Step(6.0, 6, 33)]
    assert kills.cost(steps, at=1.5) == (4.5, 2)


def test_goodput_of_a_run_with_one_kill(kills: ModuleType, goodput: ModuleType) -> None:
    """A step a second for 50 s, 10 s of silence, 5 steps again, 35 new ones."""
    first = [kills.Step(float(n), n, OLD) for n in range(1, 51)]
    second = [kills.Step(60.0 + n, 45 + n, NEW) for n in range(1, 41)]
    seen = goodput.judge([*first, *second], [50.5], 100.0)
    assert seen.new_steps == 85
    assert seen.step_seconds == pytest.approx(1.0)
    assert seen.goodput == pytest.approx(0.85)
    assert seen.costs == [(15.5, 5)]


def test_a_kill_without_return_counts_as_such(kills: ModuleType, goodput: ModuleType) -> None:
    seen = goodput.judge([kills.Step(float(n), n, OLD) for n in range(1, 51)], [50.5], 100.0)
    assert (seen.kills, seen.costs, seen.goodput) == (1, [], pytest.approx(0.5))


def test_a_snapshot_and_a_checkpoint_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    checkpoint = __import__("checkpoint")
    (shm := tmp_path / "shm").mkdir()
    (storage := tmp_path / "storage").mkdir()
    for row, ways in zip(checkpoint.measure(1, 2, shm, storage), (4, 2), strict=True):
        assert row.startswith("| 13 MB in 8 arrays | ")
        least = [float(cell.split(" / ")[1]) for cell in row.strip(" |").split(" | ")[1:]]
        assert len(least) == 2 * ways - 1
        assert min(least) > 0
    assert list(storage.iterdir()) == []


def test_a_turn_of_undisturbed_training_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    overhead = __import__("overhead")
    monkeypatch.setattr(overhead, "SETTLE_S", 1.0)
    monkeypatch.setenv(overhead.MARK, "")  # put back afterwards
    bare, _ = overhead.pair(20)
    turn = overhead.measure(bare, ranks=2, seconds=1.0)
    assert turn.step > 0.01  # the half that is sleep
    assert (turn.inside, turn.beside) == ([], 0.0)
    kept = overhead.Turn(turn.step * 1.1, [0.001, 0.003], 0.05)
    assert "| 1.1000 / 1.1000 / 1.1000 | 2.000 / 2.000 / 3.000 |" in overhead.row(20, [(turn, kept)])


def test_a_control_plane_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = __import__("control_plane")
    for name, less in {"SUBMITS": 60, "CALLS": 3, "RUNNING": 5, "PENDING": 4}.items():
        monkeypatch.setattr(bench, name, less)
    with bench.databases("sqlite", tmp_path) as new:
        cells = bench.api(new(), tmp_path, 20).split(" | ")
        assert len(cells) == len(bench.API_HEAD)
        assert float(cells[0]) > 1
        passes = [float(cell) for row in bench.PASSES for cell in row(new(), tmp_path, 20).split(" | ")]
    assert len(passes) == len(bench.PASS_HEAD)
    assert min(passes) > 0
