"""Each rule from the stop of the ranks to the end of the group: what is seen -> what is done, its actions and its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import (
    DIED,
    END,
    GENERATION,
    KILLED,
    LATE,
    NOW,
    PEER_GONE,
    RAISED,
    SAVE,
    STOP,
    STUCK,
    TERMINATE,
    TRAINS,
    VICTIM,
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
    spec,
    status,
)
from workers.ending import FINAL_SAVE_S
from workers.group import (
    AGENT_RETURN_S,
    AgentSeen,
    Doing,
    EndRequest,
    Group,
    Launch,
    Seen,
)
from workers.messages import Outcome, RestoreOrder, Source
from workers.restart import decide


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
    told = {e.reason for e in decision.group.events} & {"RanksEnded", "GraceOver"}
    by_themselves = all(r.ended_at is not None for a in seen.agents if a.status for r in a.status.ranks)
    assert told == (set() if doing == Doing.ENDING else {"RanksEnded"} if by_themselves else {"GraceOver"})


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
