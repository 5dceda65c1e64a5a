"""Deadlines hold whatever is done to the wall clock."""

from __future__ import annotations

import time

import pytest

from workers.steady import SteadyClock


@pytest.mark.parametrize("set_by", [-3600.0, 3600.0])
def test_a_wall_clock_that_is_set_moves_nothing(monkeypatch: pytest.MonkeyPatch, set_by: float) -> None:
    wall = time.time
    clock = SteadyClock()
    assert abs(clock.now() - wall()) < 1
    monkeypatch.setattr(time, "time", lambda: wall() + set_by)
    before = clock.now()
    assert before <= clock.now() < before + 1
    assert abs(clock.now() - wall()) < 1


def test_a_successor_is_never_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    first = SteadyClock()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 3600)
    second = SteadyClock()
    second.reach(told := first.now())
    assert told <= second.now() < told + 1
    second.reach(told - 100)
    assert second.now() >= told
