"""Budgets: a failure and those before it -> charged, and whether the job may go on, with the reason when not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import NOW, group, spec
from workers.budget import OUT_OF_MEMORY_BUDGET, TABLE, back_off, charge
from workers.group import Doing, Group, new_group
from workers.messages import Failure, FailureClass
from workers.verdict import Verdict

USER, MEMORY, DISK, INFRASTRUCTURE, PREEMPTION, UNKNOWN = (
    FailureClass.USER,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.DISK_FULL,
    FailureClass.INFRASTRUCTURE,
    FailureClass.PREEMPTION,
    FailureClass.UNKNOWN,
)
LARGE = {"max_user_errors": 99, "max_infrastructure": 99}


def verdict(kind: FailureClass, signature: str = "now") -> Verdict:
    return Verdict(kind, "cause", 1, "rank 1 did it", signature, NOW)


def past(kind: FailureClass, times: int, signature: str | None = None, step: int | None = None, ago: float = 60) -> tuple[Failure, ...]:
    """Each at another place and step, unless told otherwise."""
    return tuple(Failure(NOW - ago, kind, "cause", signature or f"past {i}", step if signature else i) for i in range(times))


def training(failures: tuple[Failure, ...] = (), attached: bool = True, **changes: int) -> Group:
    return group(Doing.TRAINING, given=spec(**changes), failures=failures, attached=attached)


@pytest.mark.parametrize(
    ("kind", "before", "limits", "reason"),
    [
        pytest.param(USER, (), {}, "UserError", id="no user error is allowed by default"),
        pytest.param(USER, (), {"max_user_errors": 1}, None, id="one is allowed"),
        pytest.param(USER, past(USER, 1), {"max_user_errors": 1}, "UserError", id="the second is not"),
        pytest.param(USER, past(INFRASTRUCTURE, 20), {"max_user_errors": 1}, None, id="infrastructure does not use the user's budget"),
        pytest.param(MEMORY, past(MEMORY, OUT_OF_MEMORY_BUDGET - 1), {}, None, id="last one of memory"),
        pytest.param(MEMORY, past(MEMORY, OUT_OF_MEMORY_BUDGET), {}, "BudgetSpent", id="memory spent"),
        pytest.param(MEMORY, past(USER, 9), {}, None, id="user errors do not use the budget of memory"),
        pytest.param(INFRASTRUCTURE, past(INFRASTRUCTURE, 19), {}, None, id="20th of infrastructure"),
        pytest.param(INFRASTRUCTURE, past(INFRASTRUCTURE, 20), {}, "BudgetSpent", id="infrastructure spent"),
        pytest.param(INFRASTRUCTURE, past(UNKNOWN, 20), {}, "BudgetSpent", id="unknown pays with infrastructure"),
        pytest.param(UNKNOWN, past(INFRASTRUCTURE, 20), {}, "BudgetSpent", id="and the other way round"),
        pytest.param(PREEMPTION, past(INFRASTRUCTURE, 12) + past(UNKNOWN, 8), {}, "BudgetSpent", id="preemption pays with both"),
        pytest.param(PREEMPTION, past(PREEMPTION, 5), {"max_infrastructure": 6}, None, id="preemption within the budget"),
        pytest.param(INFRASTRUCTURE, past(USER, 9) + past(MEMORY, 9), {}, None, id="others do not use it"),
        pytest.param(INFRASTRUCTURE, (), {"max_infrastructure": 0}, "BudgetSpent", id="none allowed"),
        pytest.param(INFRASTRUCTURE, past(INFRASTRUCTURE, 20, ago=86_401), {}, None, id="out of the window"),
        pytest.param(INFRASTRUCTURE, past(INFRASTRUCTURE, 20, ago=86_400), {}, "BudgetSpent", id="just inside of the window"),
        pytest.param(USER, past(USER, 1, ago=3_601), {"max_user_errors": 1, "window_s": 3_600}, None, id="a shorter window"),
    ],
)
def test_budgets(kind: FailureClass, before: tuple[Failure, ...], limits: dict[str, int], reason: str | None) -> None:
    after, stop = charge(training(before, **limits), NOW, verdict(kind))
    assert (stop and stop[0]) == reason
    assert after.failures[-1] == Failure(NOW, kind, "cause", "now", 40)


@pytest.mark.parametrize(
    ("kind", "paid_by", "budget", "same", "without_steps"),
    [
        (USER, USER, 7, 2, True),
        (MEMORY, MEMORY, 3, 2, True),
        (DISK, DISK, 3, 2, True),
        (INFRASTRUCTURE, INFRASTRUCTURE, 9, 6, False),
        (UNKNOWN, INFRASTRUCTURE, 9, 3, False),
        (PREEMPTION, INFRASTRUCTURE, 9, 20, False),
    ],
)
def test_the_table(kind: FailureClass, paid_by: FailureClass, budget: int, same: int, without_steps: bool) -> None:
    """Row by row: whose budget pays, how large it is, and how many equal failures in a row end the job."""
    price = TABLE[kind]
    assert (price.paid_by, price.budget(spec(max_user_errors=7, max_infrastructure=9))) == (paid_by, budget)
    assert (price.same, price.without_steps) == (same, without_steps)


def test_every_class_has_its_row() -> None:
    assert set(TABLE) == set(FailureClass)


@pytest.mark.parametrize(("kind", "limit"), [(USER, 2), (MEMORY, 2), (DISK, 2), (UNKNOWN, 3), (INFRASTRUCTURE, 6), (PREEMPTION, 20)])
def test_the_same_failure_without_a_step_gained(kind: FailureClass, limit: int) -> None:
    _, stop = charge(training(past(kind, limit - 2, "now", 40), **LARGE), NOW, verdict(kind))
    assert stop is None
    _, stop = charge(training(past(kind, limit - 1, "now", 40), **LARGE), NOW, verdict(kind))
    assert stop is not None
    assert stop[0] == "NoProgress"
    assert stop[1].startswith(f"the same failure {limit} times in a row without a step gained: rank 1 did it")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (MEMORY, "resources.memory_gb asks for 2 GiB on each node: raise it and the limit of the node, or lower the batch size"),
        (DISK, "make room there, or point checkpoint.storage or TMPDIR to a larger disk"),
    ],
)
def test_what_can_be_done_about_it_is_said_at_the_end(kind: FailureClass, advice: str) -> None:
    for before in (past(kind, 1, "now", 40), past(kind, 3)):
        _, stop = charge(training(before), NOW, verdict(kind))
        assert stop is not None
        assert advice in stop[1]


def test_a_hang_of_a_script_without_steps_that_comes_again_at_its_place_ends_the_job() -> None:
    hang = replace(verdict(UNKNOWN), cause="hang")
    assert charge(training(past(UNKNOWN, 1, "now", None), attached=False), NOW, hang)[1] is None
    assert charge(training(past(UNKNOWN, 2, "now", None), attached=False), NOW, hang)[1] is not None


@pytest.mark.parametrize(("same", "seconds"), [(1, 0), (2, 1), (3, 2), (4, 4), (5, 8), (8, 60), (99, 60)])
def test_back_off_grows_up_to_its_limit(same: int, seconds: float) -> None:
    assert back_off(same) == seconds


@pytest.mark.parametrize(
    ("attached", "ago", "waits"),
    [(True, 3_600, 1.0), (False, 5, 1.0), (False, 3_600, 0.0)],
)
def test_back_off_needs_a_repeat_that_gained_nothing(attached: bool, ago: float, waits: float) -> None:
    """A script that reports no steps is taken to have gained some when it ran for a while."""
    step = 40 if attached else None
    after, _ = charge(training(past(INFRASTRUCTURE, 1, "now", step, ago), attached=attached), NOW, verdict(INFRASTRUCTURE))
    assert after.not_before == NOW + waits


@pytest.mark.parametrize(
    ("kind", "facts", "attached", "waits"),
    [
        pytest.param(INFRASTRUCTURE, {"signal": 9}, False, 0.0, id="killed"),
        pytest.param(INFRASTRUCTURE, {"signal": 15}, False, 0.0, id="terminated"),
        pytest.param(INFRASTRUCTURE, {"exit_code": 137}, False, 0.0, id="killed, says its shell"),
        pytest.param(INFRASTRUCTURE, {"exit_code": 35, "drill": "exit"}, False, 0.0, id="a drill"),
        pytest.param(MEMORY, {"signal": 9}, False, 2.0, id="killed for memory"),
        pytest.param(INFRASTRUCTURE, {"signal": 11}, False, 2.0, id="a crash of its own"),
        pytest.param(USER, {"exit_code": 1}, False, 2.0, id="an error of its own"),
        pytest.param(INFRASTRUCTURE, {"signal": 9}, True, 2.0, id="it reports steps, and gained none"),
    ],
)
def test_a_script_without_steps_is_not_held_back_for_what_others_did(
    kind: FailureClass, facts: dict[str, Any], attached: bool, waits: float
) -> None:
    before = past(kind, 2, "now", 40 if attached else None, ago=5)
    after, _ = charge(training(before, attached=attached, **LARGE), NOW, replace(verdict(kind), **facts))
    assert after.not_before == NOW + waits


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(past(INFRASTRUCTURE, 9, "now", 39), id="a step was gained"),
        pytest.param(past(INFRASTRUCTURE, 9, "other", 40), id="another failure"),
        pytest.param(
            past(INFRASTRUCTURE, 4, "now", 40) + past(USER, 1, "other", 40) + past(INFRASTRUCTURE, 4, "now", 40), id="not in a row"
        ),
        pytest.param(past(INFRASTRUCTURE, 9, "now", 40, ago=90_000), id="out of the window"),
    ],
)
def test_progress_is_kept_up(before: tuple[Failure, ...]) -> None:
    assert charge(training(before, **LARGE), NOW, verdict(INFRASTRUCTURE))[1] is None


@pytest.mark.parametrize(
    ("kind", "before", "reason"),
    [(USER, 1, "NoProgress"), (MEMORY, 1, "NoProgress"), (INFRASTRUCTURE, 30, None), (UNKNOWN, 30, None), (PREEMPTION, 30, None)],
)
def test_a_script_without_steps_is_only_held_to_its_budget(kind: FailureClass, before: int, reason: str | None) -> None:
    """No step is no sign of no progress there; the user's own error at the same place is."""
    _, stop = charge(training(past(kind, before, "now", None), attached=False, **LARGE), NOW, verdict(kind))
    assert (stop and stop[0]) == reason


def test_the_step_of_a_script_without_steps_is_not_known() -> None:
    after, _ = charge(training(attached=False, **LARGE), NOW, verdict(INFRASTRUCTURE))
    assert after.failures[-1].step is None


def test_failures_outside_of_the_window_are_forgotten() -> None:
    before = past(INFRASTRUCTURE, 2, ago=90_000) + past(INFRASTRUCTURE, 1)
    after, _ = charge(training(before), NOW, verdict(INFRASTRUCTURE))
    assert [f.at for f in after.failures] == [NOW - 60, NOW]


def test_failures_of_earlier_attempts_count() -> None:
    fresh = new_group(spec(prior_failures=past(INFRASTRUCTURE, 20), prior_best_step=40), NOW)
    after, stop = charge(fresh, NOW, verdict(INFRASTRUCTURE))
    assert len(after.failures) == 21
    assert stop == ("BudgetSpent", "21 failures within 24 h, the budget is 20; last: rank 1 did it")


def test_the_message_of_a_user_error_names_the_limit() -> None:
    assert charge(training(), NOW, verdict(USER))[1] == ("UserError", "rank 1 did it (max_user_errors = 0)")
