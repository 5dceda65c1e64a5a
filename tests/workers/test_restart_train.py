"""Each rule while a group trains: what ranks and agents show -> what is done, its actions and its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import (
    DIED,
    END,
    GENERATION,
    KILLED,
    LEFT,
    NOW,
    RAISED,
    SAVE,
    STARTS,
    STOP,
    TRAINS,
    VICTIM,
    ended,
    look,
    rank,
    ranks_seen,
    recovery,
    said,
    short,
    silent,
    spec,
    stacks,
    status,
)
from workers.group import (
    AGENT_LOST_S,
    AGENT_PAUSED_S,
    AgentSeen,
    Doing,
    Group,
    Seen,
    TakeStacks,
    Unstage,
    new_group,
)
from workers.messages import FailureClass, GroupPhase, RankReport, RestoreOrder, Source
from workers.restart import CULPRIT_S, STACKS_S, decide


def missing(seconds: float, **changes: Any) -> Seen:
    return look(status(0, rank(0)), AgentSeen(1, status(1, rank(1)), NOW - seconds, **changes))


@pytest.mark.parametrize(
    ("seen", "doing", "actions", "reason"),
    [
        pytest.param(ranks_seen(rank(0), rank(1)), Doing.TRAINING, (), "Training", id="all run"),
        pytest.param(ranks_seen(ended(0), rank(1)), Doing.TRAINING, (), "Training", id="one ended with 0, the other runs"),
        pytest.param(ranks_seen(ended(0), ended(1)), Doing.FINISHING, SAVE, "WritingFinalCheckpoint", id="all ended with 0"),
        pytest.param(ranks_seen(rank(0), KILLED), Doing.STOPPING, STOP, "Failure", id="a signal"),
        pytest.param(ranks_seen(ended(0), KILLED), Doing.STOPPING, STOP, "Failure", id="0 and a signal is no success"),
        pytest.param(ranks_seen(rank(0), RAISED), Doing.CLOSING, STOP, "UserError", id="an exception of the user's code"),
        pytest.param(ranks_seen(VICTIM, rank(1)), Doing.TRAINING, (), "WaitingForCulprit", id="only a consequence yet"),
        pytest.param(ranks_seen(VICTIM, KILLED), Doing.STOPPING, STOP, "Failure", id="consequence and cause"),
        pytest.param(look(status(0, rank(0)), DIED), Doing.STOPPING, STOP, "Failure", id="an agent died"),
        pytest.param(look(status(0, rank(0)), status(1, incarnation="new")), Doing.STOPPING, STOP, "Failure", id="an agent was replaced"),
        pytest.param(missing(AGENT_LOST_S - 0.1), Doing.TRAINING, (), "Training", id="an agent missed some beats"),
        pytest.param(missing(AGENT_LOST_S), Doing.STOPPING, STOP, "Failure", id="an agent missed too many beats, Ray cannot tell why"),
        pytest.param(missing(6, alive=True), Doing.TRAINING, (), "Training", id="Ray knows of no death: it pauses"),
        pytest.param(missing(AGENT_PAUSED_S, alive=True), Doing.STOPPING, STOP, "Failure", id="for too long"),
        pytest.param(missing(0.1, node_lost=True), Doing.STOPPING, STOP, "Failure", id="its node has ended, says Ray"),
        pytest.param(
            ranks_seen(rank(0, step_at=NOW - 11), rank(1, step_at=NOW - 11)),
            Doing.TRAINING,
            (TakeStacks(NOW),),
            "TakingStacks",
            id="no step for long: evidence first",
        ),
        pytest.param(
            look(AgentSeen(0, None), AgentSeen(1, None)), Doing.TRAINING, (), "Training", id="a new coordinator has heard nothing yet"
        ),
        pytest.param(ranks_seen(rank(0, ours=True, exit_code=1), rank(1)), Doing.TRAINING, (), "Training", id="ended by our signal"),
    ],
)
def test_training(seen: Seen, doing: Doing, actions: Any, reason: str) -> None:
    assert short(decide(TRAINS, seen, NOW)) == (doing, actions, reason)


@pytest.mark.parametrize(
    ("before", "seen", "look_again_at"),
    [
        (TRAINS, ranks_seen(rank(0), rank(1, step_at=NOW - 1)), NOW - 0.1 + 10.05),
        (TRAINS, ranks_seen(rank(0, step_slowest=4.0), rank(1)), NOW - 0.1 + 20.05),
        (replace(TRAINS, attached=False), ranks_seen(silent(0), silent(1)), None),
        (TRAINS, ranks_seen(silent(0), silent(1)), NOW + 580.05),
        (TRAINS, ranks_seen(VICTIM, rank(1)), NOW - 0.1 + CULPRIT_S),
        (TRAINS, ranks_seen(rank(0), KILLED), NOW + 1),
        (TRAINS, ranks_seen(rank(0), rank(1), end=END), NOW + 30),
        (STARTS, ranks_seen(rank(0, new_step_at=None), rank(1)), NOW - 0.1 + 10.05),
        (replace(STARTS, attached=False), ranks_seen(silent(0, started_at=NOW - 0.4), silent(1)), NOW + 0.6),
        (replace(STARTS, attached=False), ranks_seen(silent(0)), NOW + 60),
    ],
)
def test_when_to_look_again(before: Group, seen: Seen, look_again_at: float | None) -> None:
    assert decide(before, seen, NOW).look_again_at == (None if look_again_at is None else pytest.approx(look_again_at, abs=1e-3))


ASKED = replace(TRAINS, stacks_asked_at=NOW - 0.2)
BEHIND = (rank(0, step_at=NOW - 11), rank(1, step=39, step_at=NOW - 11))


def hung(*answers: float | None) -> Seen:
    """Two silent ranks; ``answers``: the request whose stacks each node has told."""
    told = (stacks(0, "sleep (train.py:7)"), stacks(1, "all_reduce (torch/distributed/x.py:1)"))
    return look(*(status(n, BEHIND[n], stacks_of=asked, stacks=(told[n],) if asked else ()) for n, asked in enumerate(answers)))


@pytest.mark.parametrize(
    ("before", "seen", "actions", "reason"),
    [
        pytest.param(TRAINS, hung(None, None), (TakeStacks(NOW),), "TakingStacks", id="asked at once"),
        pytest.param(ASKED, hung(NOW - 0.2, None), (TakeStacks(NOW - 0.2),), "TakingStacks", id="one has not answered"),
        pytest.param(ASKED, hung(NOW - 0.2, NOW - 99), (TakeStacks(NOW - 0.2),), "TakingStacks", id="that answers an older request"),
        pytest.param(ASKED, hung(NOW - 0.2, NOW - 0.2), STOP, "Failure", id="all have answered"),
        pytest.param(replace(TRAINS, stacks_asked_at=NOW - STACKS_S), hung(None, None), STOP, "Failure", id="nobody answers in time"),
    ],
)
def test_the_stacks_of_a_hang_come_before_its_end(before: Group, seen: Seen, actions: Any, reason: str) -> None:
    decision = decide(before, seen, NOW)
    assert (decision.actions, decision.reason) == (actions, reason)


def test_the_stacks_decide_who_is_blamed_and_stay_in_the_incident() -> None:
    (incident,) = decide(ASKED, hung(NOW - 0.2, NOW - 0.2), NOW).group.incidents
    assert (incident.cause, incident.blamed_rank, incident.blamed_node) == ("hang", 0, "n0")
    assert incident.stacks == {0: "sleep (train.py:7)", 1: "all_reduce (torch/distributed/x.py:1)"}
    assert incident.excerpt == "sleep (train.py:7)"
    assert incident.at == pytest.approx(NOW - 11)
    late = replace(TRAINS, stacks_asked_at=NOW - STACKS_S)
    (incident,) = decide(late, hung(None, None), NOW).group.incidents
    assert (incident.blamed_rank, incident.stacks) == (1, {})


def test_a_group_that_goes_on_is_not_ended_and_asks_anew_the_next_time() -> None:
    after = decide(ASKED, ranks_seen(rank(0), rank(1)), NOW)
    assert short(after) == (Doing.TRAINING, (), "Training")
    assert after.group.stacks_asked_at is None


@pytest.mark.parametrize(
    ("seen", "cause", "kind", "blamed_rank", "blamed_node", "action"),
    [
        (ranks_seen(rank(0), KILLED), "signal", FailureClass.INFRASTRUCTURE, 1, "n1", "restart_in_place"),
        (ranks_seen(VICTIM, KILLED), "signal", FailureClass.INFRASTRUCTURE, 1, "n1", "restart_in_place"),
        (ranks_seen(rank(0), RAISED), "exception", FailureClass.USER, 1, "n1", "stop"),
        (look(status(0, rank(0)), LEFT), "node_lost", FailureClass.INFRASTRUCTURE, None, "n1", "restart_in_place"),
        (look(status(0, rank(0)), DIED), "agent_lost", FailureClass.INFRASTRUCTURE, None, "n1", "restart_in_place"),
    ],
)
def test_incident(seen: Seen, cause: str, kind: FailureClass, blamed_rank: int | None, blamed_node: str, action: str) -> None:
    after = decide(TRAINS, seen, NOW).group
    incident = after.incidents[-1]
    assert (incident.cause, incident.kind, incident.blamed_rank, incident.blamed_node) == (cause, kind, blamed_rank, blamed_node)
    assert (incident.action, incident.generation, incident.last_step) == (action, GENERATION, 40)
    assert incident.message.startswith(f"{kind}: ")
    assert [f.cause for f in after.failures] == [cause]


def test_a_second_step_may_take_as_long_as_a_first() -> None:
    """How long a step takes is not known yet."""
    first_done = ranks_seen(*(rank(n, started_at=NOW - 99, step_at=NOW - 60, step_slowest=None) for n in (0, 1)))
    decision = decide(TRAINS, first_done, NOW)
    assert short(decision) == (Doing.TRAINING, (), "Training")
    assert decision.look_again_at == pytest.approx(NOW + 540.05, abs=1e-3)


def test_a_restarted_generation_is_watched_as_tightly_as_the_one_before() -> None:
    known = decide(TRAINS, ranks_seen(rank(0, step_slowest=2.0), rank(1, step_slowest=4.0)), NOW).group
    assert known.step_slowest == 4.0
    first_done = [rank(n, generation=GENERATION + 1, step_at=NOW - 15, step_slowest=None) for n in (0, 1)]
    seen = look(*(status(r.node_index, r, generation=GENERATION + 1) for r in first_done))
    again = replace(known, generation=GENERATION + 1)
    assert decide(again, seen, NOW).look_again_at == pytest.approx(NOW + 5.05, abs=1e-3)
    assert decide(replace(again, step_slowest=2.5), seen, NOW).reason == "TakingStacks"


def test_steps_that_are_done_again_are_told_and_may_be_saved() -> None:
    again = replace(STARTS, restore=RestoreOrder(Source.STORAGE, 20, "/c/20"), best_step=40, recovery=recovery(), started_at=NOW - 99)
    starting = decide(again, ranks_seen(rank(0, step=25, new_step_at=None), rank(1, **FRESH)), NOW).group
    assert (starting.stepping, starting.shown[1]) == (False, "WaitingForFirstStep")
    stepping = decide(again, ranks_seen(*(rank(n, step=25, new_step_at=None) for n in (0, 1))), NOW).group
    assert (stepping.doing, stepping.training, stepping.stepping) == (Doing.TRAINING, False, True)
    assert stepping.shown == (GroupPhase.RECOVERING, "RedoingSteps", "redoing steps 21 to 40")
    assert not replace(stepping, generation=GENERATION + 1).stepping


READ_AT = {"/c/30": None}
FRESH = {"restored_at": None, "step": None, "step_at": None, "new_step_at": None}


@pytest.mark.parametrize(
    ("ranks", "freed"),
    [
        pytest.param((rank(0), rank(1, **FRESH)), False, id="one has not restored"),
        pytest.param((rank(0, **FRESH), rank(1, **FRESH)), False, id="none has"),
        pytest.param((rank(0),), False, id="one is not heard of"),
        pytest.param((rank(0), rank(1, **FRESH | {"restored_at": NOW - 1})), True, id="all have, one without a new step"),
        pytest.param((rank(0), rank(1, **FRESH | {"first_step_at": NOW - 1})), True, id="one trains without"),
        pytest.param((rank(0), ended(1, **FRESH)), True, id="one has ended"),
    ],
)
def test_a_staged_checkpoint_stays_until_all_ranks_have_restored(ranks: tuple[RankReport, ...], freed: bool) -> None:
    seen = look(*(status(r.node_index, r, staged=READ_AT) for r in ranks))
    for before in (TRAINS, STARTS):
        assert decide(before, seen, NOW).actions == ((Unstage(),) if freed else ())


def test_a_later_attempt_expects_steps_where_an_earlier_one_reported_them() -> None:
    """A script that needs long before workers.start() has not trained yet, and one that hangs there is found."""
    launched = ranks_seen(silent(0), silent(1))
    for prior, training in ((40, False), (None, True)):
        before = replace(
            new_group(spec(prior_best_step=prior), NOW), doing=Doing.TRAINING, generation=GENERATION, incarnations=STARTS.incarnations
        )
        decision = decide(before, launched, NOW)
        assert decision.group.training is training
        assert (decision.look_again_at is not None) is (not training)


def test_a_consequence_alone_is_judged_after_a_moment() -> None:
    decision = decide(TRAINS, ranks_seen(VICTIM, rank(1)), NOW - 0.1 + CULPRIT_S + 0.001)
    assert short(decision) == (Doing.STOPPING, STOP, "Failure")
    assert decision.group.incidents[-1].kind == FailureClass.UNKNOWN


def test_first_step_starts_the_training() -> None:
    decision = decide(STARTS, ranks_seen(rank(0), rank(1)), NOW)
    assert (decision.reason, decision.group.training, decision.group.started_at, said(decision)) == ("Training", True, NOW, ["Training"])
    assert decision.group.shown[0] == GroupPhase.RUNNING


def test_first_new_step_ends_the_recovery() -> None:
    ranks = [rank(n, started_at=NOW - 0.7, restored_at=NOW - 0.6, new_step_at=NOW - 0.5) for n in (0, 1)]
    open_one = recovery(restored_from=Source.MEMORY, lost_steps=0)
    older = replace(open_one.incident, generation=GENERATION - 2)
    before = replace(STARTS, started_at=NOW - 99, recovery=open_one, incidents=(older, open_one.incident))
    decision = decide(before, ranks_seen(*ranks), NOW)
    assert [i.generation for i in decision.group.incidents] == [GENERATION - 2, GENERATION - 1]
    assert (decision.reason, decision.group.recovery, said(decision)) == ("Training", None, ["Recovered"])
    assert decision.group.incidents[-1].recovery_seconds == pytest.approx(0.5)
    assert decision.group.events[-1].message == "signal: recovered in 0.500 s from memory, 0 steps lost"


def test_a_finished_job_that_reported_no_step_has_still_run() -> None:
    before = replace(STARTS, attached=False, best_step=None)
    ranks = [replace(silent(n), exit_code=0, ended_at=NOW) for n in (0, 1)]
    decision = decide(before, ranks_seen(*ranks), NOW)
    assert short(decision) == (Doing.FINISHING, SAVE, "WritingFinalCheckpoint")
    assert decision.group.started_at == NOW


def test_best_step_and_attachment_are_remembered() -> None:
    after = decide(replace(TRAINS, attached=False), ranks_seen(rank(0, step=47), rank(1, step=46)), NOW).group
    assert (after.best_step, after.attached, [r.rank for r in after.ranks]) == (47, True, [0, 1])
    assert decide(TRAINS, ranks_seen(rank(0, generation=2, step=99), rank(1)), NOW).group.best_step == 40
