"""Each rule from the launch to the end: what ranks and agents show -> what is done, its actions and its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import (
    END,
    GENERATION,
    NOW,
    PEER_GONE,
    ended,
    error,
    found,
    group,
    held,
    idle,
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
from workers.ending import FINAL_SAVE_S
from workers.group import (
    AGENT_LOST_S,
    AGENT_RETURN_S,
    AgentSeen,
    Doing,
    EndRequest,
    Group,
    Launch,
    SaveFinal,
    Seen,
    StopRanks,
    TakeStacks,
    TerminateRanks,
)
from workers.messages import FailureClass, GroupPhase, Outcome, RestoreOrder, Source
from workers.restart import CULPRIT_S, STACKS_S, decide

STOP, TERMINATE, SAVE = (StopRanks(GENERATION),), (TerminateRanks(GENERATION),), (SaveFinal(GENERATION),)
TRAINS = group(Doing.TRAINING, training=True, started_at=NOW - 15)
STARTS = group(Doing.TRAINING)
VICTIM = ended(0, 1, NOW - 0.1, error=error("RuntimeError", PEER_GONE))
RAISED = ended(1, 1, error=error("ValueError", "bad sample"))
KILLED = ended(1, -9)
DIED = AgentSeen(1, status(1, rank(1)), NOW - 0.05, died=True)
LEFT = replace(DIED, node_lost=True)
STUCK = status(1, rank(1, ours=True), stuck=(101,))
LATE = NOW - AGENT_RETURN_S - 1


def missing(seconds: float) -> Seen:
    return look(status(0, rank(0)), AgentSeen(1, status(1, rank(1)), NOW - seconds))


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
        pytest.param(missing(AGENT_LOST_S), Doing.STOPPING, STOP, "Failure", id="an agent missed too many beats"),
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
        (TRAINS, ranks_seen(rank(0, step_p99=4.0), rank(1)), NOW - 0.1 + 20.05),
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


@pytest.mark.parametrize(
    ("seen", "since", "doing", "actions", "reason"),
    [
        pytest.param(ranks_seen(rank(0), ended(1, -9)), NOW - 1, Doing.STOPPING, STOP, "StoppingRanks", id="one lives"),
        pytest.param(look(status(0), DIED), NOW - 1, Doing.STOPPING, STOP, "StoppingRanks", id="dead agent awaited"),
        pytest.param(look(status(0), DIED), LATE, Doing.CLOSING, STOP, "NodeLost", id="dead agent does not return"),
        pytest.param(look(status(0), STUCK), NOW - 1, Doing.STOPPING, STOP, "StoppingRanks", id="stuck, for now"),
        pytest.param(look(status(0), STUCK), LATE, Doing.CLOSING, STOP, "ProcessesStuck", id="stuck for good"),
        pytest.param(look(status(0), status(1, stopped=False)), LATE, Doing.STOPPING, STOP, "StoppingRanks", id="slow survey"),
        pytest.param(idle(ready=False, catalog=()), NOW - 1, Doing.WARMING, (), "Warming", id="launchers warm up"),
        pytest.param(
            look(status(0, holdings=(held(0, 40),)), status(1, holdings=(held(1, 40),))),
            NOW - 1,
            Doing.LAUNCHING,
            (Launch(GENERATION + 1, RestoreOrder(Source.MEMORY, 40), 41),),
            "Launching",
            id="all stopped",
        ),
    ],
)
def test_stopping(seen: Seen, since: float, doing: Doing, actions: Any, reason: str) -> None:
    decision = decide(group(Doing.STOPPING, since, recovery=recovery(stopped_at=None)), seen, NOW)
    assert short(decision) == (doing, actions, reason)
    assert decision.look_again_at == NOW + 1


def test_a_lost_node_turns_the_incident_into_a_relaunch() -> None:
    after = decide(group(Doing.STOPPING, LATE, recovery=recovery()), look(status(0), DIED), NOW).group
    assert (after.outcome, after.incidents[-1].action) == (Outcome.LOST, "relaunch")
    assert "agent 1 on node n1" in after.message


def test_when_all_had_stopped_is_kept_for_the_incident() -> None:
    after = decide(group(Doing.STOPPING, recovery=recovery(stopped_at=None)), idle(ready=False), NOW).group
    assert after.recovery is not None
    assert after.recovery.stopped_at == NOW


@pytest.mark.parametrize(
    ("seen", "since", "doing", "actions", "reason", "events"),
    [
        (idle(), NOW - 1, Doing.FINISHING, SAVE, "WritingFinalCheckpoint", []),
        (idle(final_saved=True), NOW - 1, Doing.CLOSING, STOP, "Completed", []),
        (idle(), NOW - FINAL_SAVE_S - 1, Doing.CLOSING, STOP, "Completed", ["FinalCheckpointFailed"]),
        (idle(end=END), NOW - 1, Doing.FINISHING, SAVE, "WritingFinalCheckpoint", []),
    ],
)
def test_finishing(seen: Seen, since: float, doing: Doing, actions: Any, reason: str, events: list[str]) -> None:
    decision = decide(group(Doing.FINISHING, since), seen, NOW)
    assert short(decision) == (doing, actions, reason)
    assert said(decision) == events
    assert decision.group.outcome == (Outcome.SUCCEEDED if doing == Doing.CLOSING else None)


@pytest.mark.parametrize(
    ("seen", "doing", "actions", "reason"),
    [
        (ranks_seen(rank(0), rank(1), end=END), Doing.ENDING, TERMINATE, "EndRequested"),
        (ranks_seen(ended(0), rank(1), end=END), Doing.ENDING, TERMINATE, "EndRequested"),
        (ranks_seen(rank(0), RAISED, end=END), Doing.ENDING, TERMINATE, "EndRequested"),
        (ranks_seen(ended(0), ended(1), end=END), Doing.FINISHING, SAVE, "WritingFinalCheckpoint"),
    ],
)
def test_end_of_a_group_that_trains(seen: Seen, doing: Doing, actions: Any, reason: str) -> None:
    assert short(decide(TRAINS, seen, NOW)) == (doing, actions, reason)


@pytest.mark.parametrize(
    ("seen", "since", "grace_s", "doing", "actions", "reason", "look_again_at"),
    [
        (ranks_seen(rank(0, ours=True), rank(1, ours=True)), NOW - 1, 30, Doing.ENDING, TERMINATE, "GraceRunning", NOW + 1),
        (ranks_seen(rank(0, ours=True), rank(1, ours=True)), NOW - 1, 1.5, Doing.ENDING, TERMINATE, "GraceRunning", NOW + 0.5),
        (ranks_seen(ended(0, -15, ours=True), rank(1, ours=True)), NOW - 1, 30, Doing.ENDING, TERMINATE, "GraceRunning", NOW + 1),
        (ranks_seen(rank(0, ours=True), rank(1, ours=True)), NOW - 31, 30, Doing.CLOSING, STOP, "Stopped", NOW + 1),
        (ranks_seen(ended(0, -15, ours=True), ended(1, 0, ours=True)), NOW - 1, 30, Doing.CLOSING, STOP, "Stopped", NOW + 1),
    ],
)
def test_grace(seen: Seen, since: float, grace_s: float, doing: Doing, actions: Any, reason: str, look_again_at: float) -> None:
    decision = decide(group(Doing.ENDING, since, end=EndRequest(since, grace_s)), seen, NOW)
    assert (*short(decision), decision.look_again_at) == (doing, actions, reason, look_again_at)
    assert decision.group.outcome == (Outcome.STOPPED if doing == Doing.CLOSING else None)


CLOSES = group(Doing.CLOSING, outcome=Outcome.FAILED, reason="UserError", message="rank 1 raised")


@pytest.mark.parametrize(
    ("seen", "doing", "actions", "reason"),
    [
        (ranks_seen(rank(0), RAISED), Doing.CLOSING, STOP, "StoppingRanks"),
        (ranks_seen(ended(0, -9, ours=True), RAISED), Doing.ENDED, (), "UserError"),
        (look(status(0), DIED), Doing.ENDED, (), "UserError"),
        (look(status(0), AgentSeen(1, None)), Doing.ENDED, (), "UserError"),
    ],
)
def test_closing(seen: Seen, doing: Doing, actions: Any, reason: str) -> None:
    assert short(decide(CLOSES, seen, NOW)) == (doing, actions, reason)


def test_the_end_is_when_the_last_rank_ended() -> None:
    after = decide(CLOSES, ranks_seen(ended(0, -9, NOW - 50), ended(1, 1, NOW - 60)), NOW).group
    assert (after.ended_at, after.events[-1].reason, after.events[-1].message) == (NOW - 50, "Failed", "rank 1 raised")


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("seen", [ranks_seen(rank(0), KILLED), idle(end=END), idle(catalog=(found(3),)), look(DIED)])
@pytest.mark.parametrize("doing", [Doing.CLOSING, Doing.ENDED])
def test_an_outcome_never_changes(doing: Doing, seen: Seen, outcome: Outcome) -> None:
    before = group(doing, outcome=outcome, reason="Why", message="so it is")
    after = decide(before, seen, NOW).group
    assert (after.outcome, after.reason, after.message, after.end) == (outcome, "Why", "so it is", None)


def test_nothing_follows_the_end() -> None:
    over = group(Doing.ENDED, outcome=Outcome.LOST, reason="NodeLost")
    decision = decide(over, ranks_seen(rank(0), KILLED, end=END), NOW)
    assert (*short(decision), decision.look_again_at) == (Doing.ENDED, (), "NodeLost", None)


MEMORY = RestoreOrder(Source.MEMORY, 40)
STAGED = RestoreOrder(Source.STORAGE, 30, found(30).url)


@pytest.mark.parametrize(
    ("before", "seen"),
    [
        (group(Doing.PLACING), look(status(0), AgentSeen(1, None))),
        (group(Doing.PLACING), idle()),
        (group(Doing.WARMING), idle(ready=False)),
        (group(Doing.LOCATING), idle()),
        (group(Doing.LOCATING), idle(catalog=(found(36, "torn"), found(30)))),
        (group(Doing.LOCATING), idle(catalog=())),
        (group(Doing.STAGING, restore=STAGED), idle()),
        (group(Doing.STAGING, restore=STAGED), idle(staged={found(30).url: None})),
        (group(Doing.LAUNCHING, generation=4, restore=MEMORY), idle()),
        (TRAINS, ranks_seen(rank(0), rank(1))),
        (TRAINS, ranks_seen(rank(0), KILLED)),
        (TRAINS, ranks_seen(VICTIM, rank(1))),
        (TRAINS, look(status(0, rank(0)), DIED)),
        (TRAINS, ranks_seen(rank(0), rank(1), end=END)),
        (TRAINS, ranks_seen(ended(0), ended(1))),
        (group(Doing.STOPPING, recovery=recovery()), look(status(0), STUCK)),
        (group(Doing.STOPPING, recovery=recovery()), idle(catalog=(found(30),))),
        (group(Doing.FINISHING), idle()),
        (group(Doing.ENDING, end=END), ranks_seen(rank(0, ours=True), rank(1, ours=True))),
        (CLOSES, ranks_seen(rank(0), RAISED)),
        (CLOSES, idle()),
    ],
)
def test_a_coordinator_that_takes_over_decides_the_same(before: Group, seen: Seen) -> None:
    """It has the state that was kept, before or after the decision, and sees the same: same orders, and nothing is counted twice."""
    first = decide(before, seen, NOW)
    assert decide(before, seen, NOW) == first
    again = decide(first.group, seen, NOW + 0.01)
    assert again.actions == first.actions
    assert again.group.generation == first.group.generation
    assert (again.group.failures, again.group.incidents) == (first.group.failures, first.group.incidents)
    assert again.group.events == first.group.events


def test_a_spent_budget_ends_the_group() -> None:
    before = replace(TRAINS, spec=spec(max_infrastructure=0))
    decision = decide(before, ranks_seen(rank(0), KILLED), NOW)
    assert short(decision) == (Doing.CLOSING, STOP, "BudgetSpent")
    assert (decision.group.outcome, decision.group.incidents[-1].action) == (Outcome.FAILED, "stop")


@pytest.mark.parametrize(("node_lost", "cause"), [(False, "agent_lost"), (True, "node_lost")])
def test_a_lost_agent_is_blamed_not_its_victim(node_lost: bool, cause: str) -> None:
    victim = ended(0, 1, NOW - 0.1, error=error("RuntimeError", PEER_GONE))
    died = AgentSeen(1, status(1, rank(1)), NOW - 0.05, died=True, node_lost=node_lost)
    incident = decide(group(Doing.TRAINING, training=True), look(status(0, victim), died), NOW).group.incidents[-1]
    assert (incident.cause, incident.blamed_rank, incident.blamed_node) == (cause, None, "n1")


def test_stuck_processes_do_not_hide_the_outcome() -> None:
    stuck = look(status(0), status(1, rank(1, ours=True), stuck=(101,)))
    after = decide(group(Doing.STOPPING, NOW - AGENT_RETURN_S - 1, recovery=recovery()), stuck, NOW).group
    assert decide(after, stuck, NOW + AGENT_RETURN_S + 1).group.doing == Doing.ENDED


def test_grace_lasts_while_an_agent_is_not_heard() -> None:
    seen = look(status(0, ended(0, -15, ours=True)), AgentSeen(1, None, NOW - 1))
    assert decide(group(Doing.ENDING, NOW - 1, end=END), seen, NOW).group.doing == Doing.ENDING


def test_repeats_without_a_step_gained_wait_longer_each_time() -> None:
    before, waits = TRAINS, []
    for _ in range(4):
        failed = decide(before, ranks_seen(rank(0), KILLED), NOW).group
        stopped = decide(failed, idle(), NOW)
        waits.append((stopped.look_again_at or 0) - NOW if stopped.reason == "BackingOff" else 0.0)
        assert stopped.reason in ("BackingOff", "ReadingCatalog")
        before = replace(TRAINS, failures=failed.failures)
    assert waits == [0.0, 1.0, 2.0, 4.0]
    assert decide(failed, idle(), NOW + 4.1).reason == "ReadingCatalog"
    assert stopped.group.shown[1] == "BackingOff"
