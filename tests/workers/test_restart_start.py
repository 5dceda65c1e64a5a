"""Each rule on the way to a launch: what the agents tell -> what is done next, its actions and its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import (
    END,
    GENERATION,
    MEMORY_40,
    NEXT,
    NOTHING,
    NOW,
    STOP,
    STORAGE_30,
    found,
    group,
    held,
    idle,
    launch,
    look,
    rank,
    recovery,
    said,
    short,
    spec,
    status,
    with_memory,
)
from workers.failing import LAUNCH_S
from workers.group import AGENT_LOST_S, AGENT_RETURN_S, AgentSeen, Doing, Group, Launch, ReadCatalog, Seen, StopRanks, new_group
from workers.messages import Outcome, RestoreOrder, Source
from workers.restart import PLACING_S, decide

SILENT = AgentSeen(1, None, NOW - 10)
DIED = AgentSeen(1, status(1), NOW - 0.1, died=True)
LEFT = AgentSeen(1, status(1), NOW - 0.1, died=True, node_lost=True)


def warming(since: float = NOW - 10, **changes: Any) -> Group:
    return group(Doing.WARMING, since, **changes)


@pytest.mark.parametrize(
    ("before", "seen", "doing", "actions", "reason", "look_again_at"),
    [
        pytest.param(
            group(Doing.PLACING), look(status(0), SILENT), Doing.PLACING, (), "WaitingForAgents", NOW - 10 + PLACING_S, id="one silent"
        ),
        pytest.param(
            group(Doing.PLACING, NOW - PLACING_S - 1),
            look(status(0), SILENT),
            Doing.CLOSING,
            STOP,
            "PlacingTimeout",
            NOW + 1,
            id="too long silent",
        ),
        pytest.param(group(Doing.PLACING), idle(ready=False), Doing.WARMING, (), "Warming", NOW + 1, id="both answer"),
        pytest.param(
            group(Doing.PLACING), idle(), Doing.LOCATING, (ReadCatalog(NOW),), "ReadingCatalog", NOW + 1, id="both answer and are warm"
        ),
        pytest.param(warming(), look(status(0), status(1, ready=False)), Doing.WARMING, (), "Warming", NOW + 1, id="one is not warm"),
        pytest.param(warming(), look(status(0), DIED), Doing.WARMING, (), "Warming", NOW + 1, id="a dead agent is awaited"),
        pytest.param(
            warming(NOW - AGENT_RETURN_S - 1),
            look(status(0), DIED),
            Doing.CLOSING,
            STOP,
            "NodeLost",
            NOW + 1,
            id="a dead agent does not return",
        ),
        pytest.param(
            warming(NOW - 601), look(status(0), status(1, ready=False)), Doing.CLOSING, STOP, "StartTimeout", NOW + 1, id="never warm"
        ),
        pytest.param(warming(), look(status(0), SILENT), Doing.WARMING, (), "Warming", NOW + 1, id="no word yet"),
        pytest.param(
            group(Doing.LOCATING),
            look(status(0), status(1, stopped=False)),
            Doing.LOCATING,
            STOP,
            "StoppingRanks",
            NOW + 1,
            id="one still runs",
        ),
        pytest.param(group(Doing.LOCATING), look(status(0), DIED), Doing.WARMING, (), "Warming", NOW + 1, id="died while locating"),
        pytest.param(
            group(Doing.STAGING, restore=STORAGE_30), look(status(0), DIED), Doing.WARMING, (), "Warming", NOW + 1, id="died while staging"
        ),
    ],
)
def test_until_all_is_in_place(before: Group, seen: Seen, doing: Doing, actions: Any, reason: str, look_again_at: float) -> None:
    decision = decide(before, seen, NOW)
    assert (*short(decision), decision.look_again_at) == (doing, actions, reason, look_again_at)


def test_outcome_of_a_group_that_cannot_be_placed() -> None:
    decision = decide(group(Doing.PLACING, NOW - PLACING_S - 1), look(status(0), SILENT), NOW)
    assert (decision.group.outcome, decision.group.message) == (Outcome.LOST, "agents [1] did not answer within 120 s")


def test_launch_tells_the_incident_what_was_lost() -> None:
    open_one = recovery(last_step=43)
    after = decide(group(Doing.LOCATING, recovery=open_one, best_step=43), with_memory((42,), (42,)), NOW).group
    assert after.recovery is not None
    incident = after.recovery.incident
    assert (incident.restored_from, incident.resumed_step, incident.lost_steps) == (Source.MEMORY, 42, 1)
    assert after.generation == NEXT


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(idle(catalog=(), past_generation=7), id="storage knows later ones"),
        pytest.param(look(status(0, holdings=(replace(held(0, 40), generation=7),)), status(1), catalog=()), id="snapshots do"),
    ],
)
def test_generations_are_never_counted_anew(seen: Seen) -> None:
    """What kept the state of the group is gone; what is written from now on must be the newest."""
    assert decide(group(Doing.LOCATING, generation=-1, best_step=None), seen, NOW).group.generation == 8


def test_first_launch_from_storage_says_so() -> None:
    seen = idle(catalog=(found(30),), staged={found(30).url: None})
    assert said(decide(group(Doing.LOCATING), seen, NOW)) == ["Restoring"]


def test_first_generation_of_a_later_attempt_counts_on() -> None:
    fresh = new_group(spec(first_generation=7, prior_best_step=40), NOW - 1)
    decision = decide(fresh, look(status(0, generation=6), status(1, generation=6), catalog=()), NOW)
    assert decision.actions == (Launch(7, NOTHING, 41),)


@pytest.mark.parametrize(
    ("seen", "since", "doing", "actions", "reason", "cause"),
    [
        (
            look(status(0), status(1, rank(1, generation=NEXT), generation=NEXT)),
            NOW - 1,
            Doing.LAUNCHING,
            launch(MEMORY_40),
            "Launching",
            None,
        ),
        (look(status(0), DIED), NOW - 1, Doing.STOPPING, (StopRanks(NEXT),), "Failure", "agent_lost"),
        (look(status(0), status(1, incarnation="other")), NOW - 1, Doing.STOPPING, (StopRanks(NEXT),), "Failure", "agent_lost"),
        (look(status(0), status(1, problem="gone")), NOW - 1, Doing.STOPPING, (StopRanks(NEXT),), "Failure", "cannot_start"),
        (look(status(0), status(1)), NOW - LAUNCH_S - 1, Doing.STOPPING, (StopRanks(NEXT),), "Failure", "launch_timeout"),
        (look(status(0), AgentSeen(1, status(1), NOW - 2)), NOW - 3, Doing.LAUNCHING, launch(MEMORY_40), "Launching", None),
        (
            look(status(0), AgentSeen(1, status(1), NOW - AGENT_LOST_S)),
            NOW - 4,
            Doing.STOPPING,
            (StopRanks(NEXT),),
            "Failure",
            "agent_lost",
        ),
    ],
)
def test_launching(seen: Seen, since: float, doing: Doing, actions: Any, reason: str, cause: str | None) -> None:
    decision = decide(group(Doing.LAUNCHING, since, generation=NEXT, restore=MEMORY_40), seen, NOW)
    assert short(decision) == (doing, actions, reason)
    assert decision.look_again_at == NOW + 1
    assert [i.cause for i in decision.group.incidents] == ([cause] if cause else [])


def test_launched_everywhere_is_training() -> None:
    ranks = [rank(n, generation=NEXT, new_step_at=None, step=None, step_at=None) for n in (0, 1)]
    seen = look(*(status(r.node_index, r, generation=NEXT) for r in ranks))
    decision = decide(group(Doing.LAUNCHING, generation=NEXT, restore=MEMORY_40), seen, NOW)
    assert short(decision) == (Doing.TRAINING, (), "WaitingForFirstStep")


@pytest.mark.parametrize("doing", [Doing.WARMING, Doing.LOCATING, Doing.STOPPING])
@pytest.mark.parametrize(
    "agent", [status(1, stopped=False), status(1, rank(1)), DIED, AgentSeen(1, None), AgentSeen(1, status(1), NOW - 9)]
)
def test_nothing_is_launched_while_a_node_is_not_stopped(doing: Doing, agent: Any) -> None:
    seen = look(status(0, holdings=(held(0, 40),)), agent, catalog=())
    decision = decide(group(doing, recovery=recovery(), restore=MEMORY_40), seen, NOW)
    assert not [a for a in decision.actions if isinstance(a, Launch)]
    assert decision.group.generation == GENERATION


@pytest.mark.parametrize("doing", [Doing.PLACING, Doing.WARMING, Doing.LOCATING, Doing.STAGING, Doing.LAUNCHING, Doing.STOPPING])
def test_end_before_the_ranks_run_is_at_once(doing: Doing) -> None:
    decision = decide(group(doing, restore=STORAGE_30), look(status(0), status(1, rank(1)), end=END), NOW)
    assert short(decision) == (Doing.CLOSING, STOP, "StoppingRanks")
    assert (decision.group.outcome, decision.group.reason, said(decision)) == (Outcome.STOPPED, "Stopped", ["EndRequested"])


@pytest.mark.parametrize("doing", [Doing.PLACING, Doing.WARMING, Doing.LOCATING, Doing.STAGING, Doing.STOPPING])
def test_a_node_that_left_the_cluster_is_not_awaited(doing: Doing) -> None:
    decision = decide(group(doing, restore=STORAGE_30, recovery=recovery()), look(status(0), LEFT, catalog=()), NOW)
    assert short(decision) == (Doing.CLOSING, STOP, "NodeLost")
    assert (decision.group.outcome, decision.group.incidents[-1].action) == (Outcome.LOST, "relaunch")
    assert decision.group.message == "node n1 has left the cluster; the job needs another placement"


def test_an_end_that_was_asked_for_comes_before_the_loss_of_a_node() -> None:
    assert decide(group(Doing.STOPPING), look(status(0), LEFT, end=END), NOW).group.outcome == Outcome.STOPPED


def test_staging_launches_only_when_all_are_stopped() -> None:
    url = "/c/30"
    seen = look(status(0, staged={url: None}), status(1, stopped=False, staged={url: None}))
    decision = decide(group(Doing.STAGING, restore=RestoreOrder(Source.STORAGE, 30, url)), seen, NOW)
    assert not [a for a in decision.actions if isinstance(a, Launch)]
