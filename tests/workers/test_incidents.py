"""Incidents: what a failure says about lost steps, and that none stays open once a later generation trains."""

from __future__ import annotations

from dataclasses import replace

from tests.workers.make import NOW, ended, group, look, rank, ranks_seen, status
from workers.failing import LAUNCH_S
from workers.group import AgentSeen, Doing, Launch, StopRanks
from workers.messages import RestoreOrder, Source
from workers.restart import decide

KILLED = ended(1, -9, NOW - 0.1)


def test_last_step_is_that_of_the_generation_that_failed() -> None:
    """Best was 100, a checkpoint of 90 was restored, the kill came at 95: nothing of 96 to 100 is lost a second time."""
    before = group(Doing.TRAINING, training=True, best_step=100, restore=RestoreOrder(Source.STORAGE, 90))
    after = decide(before, ranks_seen(rank(0, step=95), replace(KILLED, step=95)), NOW).group
    assert after.recovery is not None
    assert after.recovery.incident.last_step == 95


def test_a_failure_before_any_step_counts_from_the_state_that_was_taken_over() -> None:
    before = group(Doing.TRAINING, best_step=100, restore=RestoreOrder(Source.MEMORY, 100))
    after = decide(before, ranks_seen(rank(0, step=None), replace(KILLED, step=None)), NOW).group
    assert after.recovery is not None
    assert after.recovery.incident.last_step == 100


def test_an_incident_that_failed_again_closes_with_the_one_that_follows() -> None:
    first = decide(group(Doing.TRAINING, training=True), ranks_seen(rank(0), KILLED), NOW).group
    again = replace(first, doing=Doing.TRAINING, generation=4, restore=RestoreOrder(Source.MEMORY, 40))
    dead = replace(KILLED, generation=4, step=None, new_step_at=None)
    second = decide(again, ranks_seen(rank(0, generation=4, step=None, new_step_at=None), dead), NOW + 1).group
    assert [i.recovered_at for i in second.incidents] == [None, None]
    trains = replace(second, doing=Doing.TRAINING, generation=5)
    reports = [rank(r, generation=5, step=41, new_step_at=NOW + 2, started_at=NOW + 1.5, restored_at=NOW + 1.6) for r in (0, 1)]
    done = decide(trains, ranks_seen(*reports), NOW + 2).group
    assert [(i.generation, i.recovered_at) for i in done.incidents] == [(3, NOW + 2), (4, NOW + 2)]
    assert done.recovery is None


def test_a_lost_launcher_is_not_told_as_a_killed_rank() -> None:
    dead = [ended(r, -9, NOW - 0.1, launcher_lost=True) for r in (0, 1)]
    incident = decide(group(Doing.TRAINING, training=True), ranks_seen(*dead), NOW).group.incidents[-1]
    assert (incident.cause, incident.blamed_rank, incident.action) == ("launcher_lost", None, "restart_in_place")


def test_a_lost_attempt_says_what_follows() -> None:
    failed = decide(group(Doing.TRAINING, training=True), ranks_seen(rank(0), KILLED), NOW).group
    lost = decide(failed, look(status(0), AgentSeen(1, status(1), NOW, died=True, node_lost=True)), NOW + 1).group
    (incident,) = lost.incidents
    assert incident.action == "relaunch"
    assert "restart in place" not in incident.message
    assert "another attempt follows" in incident.message


def test_a_node_that_is_lost_while_nothing_ran_has_an_incident_too() -> None:
    before = group(Doing.WARMING, generation=-1)
    after = decide(before, look(status(0), AgentSeen(1, None, NOW, died=True, node_lost=True)), NOW).group
    (incident,) = after.incidents
    assert (incident.cause, incident.blamed_node, incident.action, incident.generation) == ("node_lost", "n1", "relaunch", 0)
    assert [f.cause for f in after.failures] == ["node_lost"]


def test_a_launch_that_never_gives_all_ranks_fails_in_time() -> None:
    before = group(Doing.TRAINING, NOW - LAUNCH_S - 1, incarnations={0: "i0", 1: "i1"})
    decision = decide(before, look(status(0, rank(0)), status(1)), NOW)
    assert decision.group.incidents[-1].cause == "launch_timeout"
    assert decision.actions == (StopRanks(3),)
    assert not any(isinstance(a, Launch) for a in decision.actions)


def test_one_line_says_class_rank_node_evidence_and_what_follows() -> None:
    after = decide(group(Doing.TRAINING, training=True), ranks_seen(rank(0), KILLED), NOW).group
    assert after.incidents[-1].message == "infrastructure: rank 1 was ended by SIGKILL, on node n1; all ranks restart in place"
