"""The pure rules: retention, cadence, agreement, names of checkpoints."""

from __future__ import annotations

import pytest

from workers.agreement import LAG, Agreement, Alone
from workers.checkpoint.cadence import Cadence, decision_at, smallest_interval
from workers.checkpoint.format import age_key, folder_name, parse_name
from workers.checkpoint.interval import FIRST_S, LEAST_S, MOST_S, PRIOR_S, auto_interval, mean_time_between_failures
from workers.checkpoint.retention import to_remove


@pytest.mark.parametrize(
    ("newest_first", "keep", "verified", "in_use", "removed"),
    [
        ("edcba", 3, "edcba", "", "ab"),
        ("edcba", 3, "cba", "", "ab"),  # the newest verified is within what is kept
        ("edcba", 2, "ba", "", "a"),  # all that is newer than the newest verified stays
        ("edcba", 2, "a", "", ""),
        ("edcba", 3, "", "", ""),  # none verified: nothing goes
        ("edcba", 1, "e", "", "abc"),  # at least two stay
        ("edcba", 0, "e", "", "abc"),
        ("edcba", -1, "e", "", "abc"),
        ("edcba", 2, "e", "b", "ac"),  # being restored
        ("ba", 1, "b", "", ""),
        ("", 3, "", "", ""),
    ],
)
def test_retention(newest_first: str, keep: int, verified: str, in_use: str, removed: str) -> None:
    assert to_remove(list(newest_first), keep, set(verified), set(in_use)) == list(removed)


@pytest.mark.parametrize(
    ("damaged", "keep", "removed"),
    [
        ("", 2, "abcd"),
        ("e", 2, "abc"),  # does not count among those that are kept
        ("ed", 3, "a"),
        ("ea", 3, "ab"),  # a damaged one that is older goes with the rest
        ("edcb", 2, ""),  # two that are not known to be damaged stay
    ],
)
def test_retention_counts_only_what_is_sound(damaged: str, keep: int, removed: str) -> None:
    assert to_remove(list("fedcba"), keep, {"f"}, set(), set(damaged)) == list(removed)


@pytest.mark.parametrize(
    ("writes", "run_s", "failures", "seconds"),
    [
        ([], 100.0, 0, FIRST_S),  # nothing was measured
        ([2.0], 0.0, 0, (2 * 2.0 * PRIOR_S) ** 0.5),  # one failure a day is assumed
        ([2.0], PRIOR_S, 1, (2 * 2.0 * PRIOR_S) ** 0.5),
        ([2.0], 0.0, 3, (2 * 2.0 * PRIOR_S / 4) ** 0.5),
        ([9.0, 9.0, 9.0, 2.0, 2.0, 2.0, 2.0], 0.0, 0, (2 * 2.0 * PRIOR_S) ** 0.5),  # the newest writes count
        ([1e-6], 0.0, 1000, LEAST_S),
        ([30.0], 10_000.0, 2000, 60.0),  # storage is idle half of the time
        ([200.0], 0.0, 0, MOST_S),
        ([4000.0], 0.0, 0, 8000.0),
    ],
)
def test_auto_interval(writes: list[float], run_s: float, failures: int, seconds: float) -> None:
    assert auto_interval(writes, run_s, failures) == pytest.approx(seconds)


def test_a_job_without_failures_is_trusted_more_and_more() -> None:
    assert mean_time_between_failures(0, 0) == PRIOR_S
    assert mean_time_between_failures(9 * PRIOR_S, 0) == 10 * PRIOR_S
    assert mean_time_between_failures(9 * PRIOR_S, 9) == PRIOR_S
    assert mean_time_between_failures(-5, 0) == PRIOR_S


@pytest.mark.parametrize(
    ("stall", "allowed", "every"),
    [(0.0, 0.1, 1), (0.1, 0.1, 1), (0.11, 0.1, 2), (0.21, 0.1, 3), (0.39, 0.1, 4), (0.41, 0.1, 5), (1.0, 0.0, 1 << 20)],
)
def test_smallest_interval(stall: float, allowed: float, every: int) -> None:
    assert smallest_interval(stall, allowed) == every


def cadence(step: float, stall: float, agreed: bool = True) -> Cadence:
    found = Cadence(None, agreed)
    found.every = 16
    for _ in range(20):
        found.observe_step(step)
        found.observe_stall(stall)
    return found


@pytest.mark.parametrize(
    ("step", "stall", "decided", "by_itself"),
    [(1.0, 0.009, 1, 1), (1.0, 0.011, 2, 2), (1.0, 0.030, 3, 4), (1.0, 0.045, 5, 8), (0.04, 0.0005, 2, 2), (0.02, 0.3, 1500, 2048)],
)
def test_cadence_decides(step: float, stall: float, decided: int, by_itself: int) -> None:
    assert cadence(step, stall).decide() == decided
    assert cadence(step, stall, agreed=False).decide() == by_itself


def test_cadence_keeps_a_given_interval_and_what_it_cannot_judge() -> None:
    fixed = Cadence(5)
    fixed.observe_step(1.0)
    fixed.observe_stall(1.0)
    assert fixed.decide() == 5
    assert [s for s in range(1, 16) if fixed.due(s)] == [5, 10, 15]
    assert Cadence(None).decide() == 1


def test_one_slow_step_does_not_change_the_interval() -> None:
    found = cadence(1.0, 0.02)
    found.observe_step(600.0)
    assert found.decide() == 2


def test_decisions_come_early_and_then_rarely() -> None:
    assert [s for s in range(1, 200) if decision_at(s)] == [8, 16, 32, 64, 128, 192]


def test_ranks_take_rank_zeros_interval_at_the_same_step() -> None:
    store = Alone()
    leader, other = Agreement(store, 0, 2), Agreement(store, 1, 2)
    other.post_interval(8, 64)  # its own view does not count
    assert other.interval(8) is None
    leader.post_interval(8, 4)
    assert (leader.interval(8), other.interval(8)) == (4, 4)


def test_ranks_stop_after_the_same_step() -> None:
    store = Alone()
    leader, other = Agreement(store, 0, 2), Agreement(store, 1, 2)
    other.seek_stop(11, 0.5)
    assert other.stop_at is None  # rank 0 has not said yet
    leader.seek_stop(10, 0.5)
    other.seek_stop(12, 0.5)
    assert leader.stop_at == other.stop_at == 10 + LAG
    fast = Agreement(Alone(), 0, 2)
    fast.seek_stop(10, 0.01)
    assert fast.stop_at == 110  # 1 s for all signals to arrive


def test_alone_stops_at_once() -> None:
    alone = Agreement(None, 0, 1)
    alone.seek_stop(10, 0.5)
    assert alone.stop_at == 10


def test_names() -> None:
    assert folder_name(7, 2, 11) == "step-000000000007.a2.g11"
    assert parse_name("step-000000000007.a2.g11") == (7, 2, 11)
    for foreign in ("step-7.a2.g11", "latest", "step-000000000007.a2.g11.tmp", ".step-000000000007.a2.g11"):
        assert parse_name(foreign) is None


def test_a_fenced_attempts_late_commit_is_not_the_newest() -> None:
    late, current = age_key(200, attempt=1, generation=3), age_key(150, attempt=2, generation=4)
    assert max(late, current) == current
