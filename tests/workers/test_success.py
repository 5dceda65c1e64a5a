"""Ends and metrics: what counts as success, what a grace left unsaved, metrics that are not finite, and how a relaunch is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import (
    END,
    NOW,
    ended,
    found,
    group,
    idle,
    look,
    rank,
    ranks_seen,
    recovery,
    said,
    silent,
    spec,
    status,
    unfit,
    with_memory,
)  # fmt: skip
from workers.group import Doing, Group, Seen
from workers.messages import CheckpointFound, FailureClass, Outcome, RankPhase, RankReport, RankState, RestoreOrder, Source, Unfit
from workers.restart import decide

TRAINS = group(Doing.TRAINING, training=True, started_at=NOW - 15)
LEFT_ALL = (ended(0), ended(1))


@pytest.mark.parametrize(
    ("asks", "steps", "missing", "reason", "said_of_it"),
    [
        pytest.param({"success_steps": 40}, (40, 40), None, "WritingFinalCheckpoint", "", id="all steps"),
        pytest.param({"success_steps": 41}, (40, 41), None, "Incomplete", "rank 0 finished step 40 of success.steps = 41", id="short"),
        pytest.param({"success_files": ("out.pt",)}, (40, 40), (None, ("out.pt",)), "LookingForFiles", "", id="a node has not looked"),
        pytest.param({"success_files": ("out.pt",)}, (40, 40), (("out.pt",), ()), "WritingFinalCheckpoint", "", id="a file on one node"),
        pytest.param(
            {"success_files": ("out.pt", "b")},
            (40, 40),
            (("out.pt", "b"), ("out.pt",)),
            "Incomplete",
            "success.files lacks out.pt",
            id="none",
        ),
    ],
)
def test_success_may_ask_for_more_than_exit_codes(
    asks: dict[str, Any], steps: tuple[int, int], missing: Any, reason: str, said_of_it: str
) -> None:
    told = missing or (None, None)
    seen = look(*(status(n, replace(LEFT_ALL[n], step=steps[n]), missing_files=told[n]) for n in (0, 1)))
    decision = decide(replace(TRAINS, spec=spec(**asks)), seen, NOW)
    assert decision.reason == reason
    assert said_of_it in decision.group.message
    if reason == "Incomplete":
        incident = decision.group.incidents[-1]
        assert (incident.cause, incident.kind, decision.group.outcome) == ("incomplete", FailureClass.USER, Outcome.FAILED)


def test_a_resumed_rank_that_had_nothing_left_to_do_is_complete() -> None:
    before = replace(TRAINS, spec=spec(success_steps=40))
    seen = ranks_seen(*(replace(r, step=None, restored=40) for r in LEFT_ALL))
    assert decide(before, seen, NOW).reason == "WritingFinalCheckpoint"


@pytest.mark.parametrize(("best_step", "asks", "warned"), [(None, {}, True), (40, {}, False), (None, {"success_files": ("x",)}, False)])
def test_an_end_without_any_sign_of_progress_is_told(best_step: int | None, asks: dict[str, Any], warned: bool) -> None:
    before = group(Doing.FINISHING, best_step=best_step, attached=best_step is not None, given=spec(**asks))
    after = decide(before, idle(final_saved=True), NOW)
    assert after.group.outcome == Outcome.SUCCEEDED
    assert ("FinishedWithoutProgress" in said(after)) is warned


NAN = rank(1, nonfinite=(("loss", 38),), nonfinite_since=38)


def test_a_metric_that_is_not_finite_is_told_once_a_generation() -> None:
    first = decide(TRAINS, ranks_seen(rank(0, nonfinite=(("loss", 39),)), NAN), NOW)
    assert said(first).count("NonFinite") == 1
    again = decide(first.group, ranks_seen(rank(0), replace(NAN, nonfinite=(("loss", 38), ("norm", 40)))), NOW)
    assert [e.message for e in again.group.events if e.reason == "NonFinite"] == [
        "metric loss of rank 0 is NaN or infinite, first at step 39",
        "metric norm of rank 1 is NaN or infinite, first at step 40",
    ]
    assert again.reason == "Training"


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (ranks_seen(rank(0), NAN), "NonFinite"),
        (ranks_seen(rank(0), replace(NAN, nonfinite_since=None)), "Training"),
    ],
)
def test_a_job_may_stop_on_metrics_that_stay_non_finite(seen: Seen, reason: str) -> None:
    decision = decide(replace(TRAINS, spec=spec(stop_on_nan=True)), seen, NOW)
    assert decision.reason == reason
    if reason == "NonFinite":
        incident = decision.group.incidents[-1]
        assert (incident.cause, incident.kind, incident.blamed_rank) == ("non_finite", FailureClass.USER, 1)
        assert "rank 1 reports loss as NaN or infinite since step 38" in incident.message


DONE = {"phase": RankPhase.DONE}


@pytest.mark.parametrize(
    ("ranks", "unsaved"),
    [
        pytest.param((ended(0, ours=True, **DONE), ended(1, ours=True, **DONE)), None, id="both left by themselves"),
        pytest.param((ended(0, ours=True, **DONE), rank(1, ours=True, phase=RankPhase.EVAL)), "ranks 1", id="one is in an eval"),
        pytest.param((rank(0, ours=True), ended(1, -15, ours=True)), "ranks 0, 1", id="one deaf, one ended by the signal"),
        pytest.param((silent(0, ours=True), ended(1, ours=True, attached=False)), "ranks 0", id="without steps"),
    ],
)
def test_a_grace_without_a_save_is_told(ranks: tuple[RankReport, ...], unsaved: str | None) -> None:
    before = group(Doing.ENDING, NOW - 31, end=END, attached=ranks[0].attached)
    after = decide(before, ranks_seen(*ranks), NOW)
    told = [e.message for e in after.group.events if e.reason == "NoSaveWithinGrace"]
    assert after.group.outcome == Outcome.STOPPED
    assert bool(told) is (unsaved is not None)
    if unsaved is not None:
        assert told[0].startswith(f"{unsaved} did not end by themselves")


def test_a_script_without_steps_is_relaunched_not_recovered() -> None:
    before = group(Doing.TRAINING, attached=False, recovery=recovery(last_step=None))
    after = decide(before, ranks_seen(silent(0, started_at=NOW - 0.5), silent(1, started_at=NOW - 0.5)), NOW)
    (event,) = [e for e in after.group.events if e.reason == "Recovered"]
    assert "relaunched in 0.500 s; the script reports no steps" in event.message


POISONED = replace(TRAINS, spec=spec(stop_on_nan=True, max_user_errors=5), restore=None)
BACK_AT_20 = RestoreOrder(Source.STORAGE, 20, found(20).url)


def poisoned_then_stopped(before: Group = POISONED) -> Group:
    return decide(before, ranks_seen(rank(0), NAN), NOW).group


@pytest.mark.parametrize(
    ("catalog", "reason", "restore"),
    [
        pytest.param(None, "ReadingCatalog", None, id="storage is asked, though memory holds the newest state"),
        pytest.param((found(40), found(20), found(10)), "ReadingCheckpoint", BACK_AT_20, id="the newest from before"),
        pytest.param(
            (found(40), replace(found(30), finite=False), found(20)),
            "ReadingCheckpoint",
            BACK_AT_20,
            id="a flagged one is passed over",
        ),
        pytest.param((found(40), found(30, "flipped"), found(20)), "ReadingCheckpoint", BACK_AT_20, id="so is a damaged one"),
        pytest.param((found(40),), "Launching", RestoreOrder(Source.MEMORY, 40), id="none from before: as after any failure"),
        pytest.param((), "Launching", RestoreOrder(Source.MEMORY, 40), id="no checkpoint at all"),
    ],
)
def test_a_program_that_fails_on_poisoned_metrics_goes_back_behind_them(
    catalog: tuple[CheckpointFound, ...] | None, reason: str, restore: RestoreOrder | None
) -> None:
    decision = decide(poisoned_then_stopped(), with_memory((40,), (40,), catalog=catalog), NOW)
    assert (decision.reason, decision.group.restore) == (reason, restore)
    assert ("RolledBack" in said(decision)) is (restore == BACK_AT_20)


def test_an_infrastructure_failure_costs_no_steps_whatever_the_metrics_are() -> None:
    before = replace(POISONED, spec=spec())
    stopped = decide(before, ranks_seen(rank(0), replace(NAN, signal=9, ended_at=NOW, state=RankState.EXITED)), NOW).group
    decision = decide(stopped, with_memory((40,), (40,)), NOW)
    assert decision.group.restore == RestoreOrder(Source.MEMORY, 40)


def test_a_roll_back_happens_once_and_what_it_left_is_never_taken_again() -> None:
    back = decide(poisoned_then_stopped(), with_memory((40,), (40,), catalog=(found(40), found(20))), NOW).group
    assert [(c.step, c.problem) for c in back.excluded] == [(40, unfit("its metrics were not finite", Unfit.UNWANTED))]
    assert not back.damaged
    launched = decide(back, idle(staged={found(20).url: None}), NOW).group
    assert (launched.doing, launched.roll_back, launched.nonfinite) == (Doing.LAUNCHING, None, ())
    assert launched.recovery is not None
    assert (launched.recovery.incident.resumed_step, launched.recovery.incident.lost_steps) == (20, 20)
    again = replace(POISONED, failures=launched.failures)
    assert poisoned_then_stopped(again).reason == "NoProgress"
