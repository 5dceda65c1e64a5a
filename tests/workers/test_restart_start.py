"""Each rule on the way to a launch: what the agents tell -> what is done next, its actions and its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import (
    END,
    GENERATION,
    NOTHING,
    NOW,
    committed,
    found,
    group,
    held,
    idle,
    look,
    rank,
    recovery,
    said,
    short,
    spec,
    status,
    unfit,
    with_memory,
)
from workers.failing import LAUNCH_S
from workers.group import AGENT_LOST_S, AGENT_RETURN_S, AgentSeen, Doing, Group, Launch, ReadCatalog, Seen, Stage, StopRanks, new_group
from workers.messages import Outcome, RestoreOrder, Source, Unfit
from workers.restart import PLACING_S, decide

SILENT = AgentSeen(1, None, NOW - 10)
DIED = AgentSeen(1, status(1), NOW - 0.1, died=True)
LEFT = AgentSeen(1, status(1), NOW - 0.1, died=True, node_lost=True)
MEMORY_40 = RestoreOrder(Source.MEMORY, 40)
STORAGE_30 = RestoreOrder(Source.STORAGE, 30, found(30).url)
STOP, NEXT = (StopRanks(GENERATION),), GENERATION + 1


def launch(restore: RestoreOrder, await_step: int = 41) -> tuple[Launch]:
    return (Launch(NEXT, restore, await_step),)


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


@pytest.mark.parametrize(
    ("seen", "changes", "doing", "actions", "reason"),
    [
        pytest.param(
            with_memory((39, 40), (40,)), {}, Doing.LAUNCHING, launch(MEMORY_40), "Launching", id="memory is newest, storage is not read"
        ),
        pytest.param(
            with_memory((39, 40), (38, 39)),
            {},
            Doing.LAUNCHING,
            launch(RestoreOrder(Source.MEMORY, 39)),
            "Launching",
            id="torn snapshot, the step before it",
        ),
        pytest.param(
            with_memory((40,), (40,)),
            {"checkpoints": (committed(40),)},
            Doing.LAUNCHING,
            launch(MEMORY_40),
            "Launching",
            id="memory as new as storage",
        ),
        pytest.param(
            with_memory((20,), (20,)),
            {"checkpoints": (committed(30),)},
            Doing.LOCATING,
            (ReadCatalog(NOW - 10),),
            "ReadingCatalog",
            id="memory older than the committed one",
        ),
        pytest.param(
            with_memory((20,), (20,), catalog=(found(30), found(10))),
            {"checkpoints": (committed(30),)},
            Doing.STAGING,
            (Stage(found(30).url),),
            "ReadingCheckpoint",
            id="storage newer than memory",
        ),
        pytest.param(
            with_memory((20,), (20,), catalog=(found(30, "torn"), found(10))),
            {"checkpoints": (committed(30),)},
            Doing.LAUNCHING,
            launch(RestoreOrder(Source.MEMORY, 20)),
            "Launching",
            id="the newer one in storage is bad",
        ),
        pytest.param(idle(), {}, Doing.LOCATING, (ReadCatalog(NOW - 10),), "ReadingCatalog", id="nothing in memory"),
        pytest.param(idle(catalog=(found(30),)), {}, Doing.STAGING, (Stage(found(30).url),), "ReadingCheckpoint", id="from storage"),
        pytest.param(
            idle(catalog=(found(30),), staged={found(30).url: None}),
            {},
            Doing.LAUNCHING,
            launch(STORAGE_30),
            "Launching",
            id="staged already",
        ),
        pytest.param(
            idle(catalog=(found(36, "truncated"), found(30))),
            {},
            Doing.STAGING,
            (Stage(found(30).url),),
            "ReadingCheckpoint",
            id="torn newest",
        ),
        pytest.param(
            idle(catalog=(found(36), found(30))),
            {"excluded": (found(36, "flipped"),)},
            Doing.STAGING,
            (Stage(found(30).url),),
            "ReadingCheckpoint",
            id="found bad before",
        ),
        pytest.param(idle(catalog=(found(36, "a"), found(30, "b"))), {}, Doing.CLOSING, STOP, "NoValidCheckpoint", id="all damaged"),
        pytest.param(
            idle(catalog=()), {"excluded": (found(30, "b"),)}, Doing.CLOSING, STOP, "NoValidCheckpoint", id="the only one was found bad"
        ),
        pytest.param(
            idle(catalog=(found(36, "EIO", Unfit.UNREADABLE), found(30))),
            {},
            Doing.LOCATING,
            (ReadCatalog(NOW - 10),),
            "CheckpointUnreadable",
            id="the newest cannot be read now",
        ),
        pytest.param(
            with_memory((20,), (20,), catalog=(found(36, "EIO", Unfit.UNREADABLE),)),
            {"checkpoints": (committed(36),)},
            Doing.LOCATING,
            (ReadCatalog(NOW - 10),),
            "CheckpointUnreadable",
            id="it is not passed over for an older state in memory either",
        ),
        pytest.param(
            idle(catalog=(found(36, "format 99", Unfit.UNSUITED), found(30))),
            {},
            Doing.CLOSING,
            STOP,
            "UnsuitedCheckpoint",
            id="of a newer version",
        ),
        pytest.param(
            idle(catalog=(found(36), found(30))),
            {"excluded": (found(36, "not finite", Unfit.UNWANTED),)},
            Doing.STAGING,
            (Stage(found(30).url),),
            "ReadingCheckpoint",
            id="gone back behind it",
        ),
        pytest.param(idle(catalog=()), {}, Doing.LAUNCHING, launch(NOTHING), "Launching", id="nothing anywhere"),
        pytest.param(
            idle(catalog_problem="EIO"), {}, Doing.LOCATING, (ReadCatalog(NOW - 10),), "ReadingCatalog", id="storage away, tried again"
        ),
    ],
)
def test_where_the_state_comes_from(seen: Seen, changes: dict[str, Any], doing: Doing, actions: Any, reason: str) -> None:
    decision = decide(group(Doing.LOCATING, **changes), seen, NOW)
    assert short(decision) == (doing, actions, reason)
    assert decision.look_again_at == NOW + 1


def test_no_valid_checkpoint_fails_with_the_list() -> None:
    group_ = decide(group(Doing.LOCATING), idle(catalog=(found(36, "truncated"), found(30, "flipped"))), NOW).group
    assert group_.outcome == Outcome.FAILED
    assert "step 36: truncated; step 30: flipped" in group_.message


def test_a_torn_checkpoint_is_skipped_with_an_event_once() -> None:
    seen = idle(catalog=(found(36, "truncated"), found(30)))
    first = decide(group(Doing.LOCATING), seen, NOW)
    assert said(first) == ["CheckpointSkipped"]
    assert "step 36" in first.group.events[0].message
    assert said(decide(first.group.go(Doing.LOCATING, NOW), seen, NOW)) == ["CheckpointSkipped"]


@pytest.mark.parametrize(
    ("stop_on_nan", "finite", "step"),
    [
        pytest.param(True, (False, False, True), 20, id="the newest from before"),
        pytest.param(True, (True, False, True), 40, id="the newest is finite"),
        pytest.param(True, (False, False, False), 40, id="there is none from before"),
        pytest.param(False, (False, False, True), 40, id="the job does not mind"),
    ],
)
def test_another_attempt_does_not_go_on_from_metrics_that_would_stop_it(stop_on_nan: bool, finite: tuple[bool, ...], step: int) -> None:
    catalog = tuple(replace(found(at), finite=known) for at, known in zip((40, 30, 20), finite, strict=True))
    before = group(Doing.LOCATING, given=spec(stop_on_nan=stop_on_nan))
    after = decide(before, idle(catalog=catalog), NOW).group
    assert after.restore is not None
    assert (after.doing, after.restore.step) == (Doing.STAGING, step)
    assert ("RolledBack" in [e.reason for e in after.events]) == (step == 20)
    assert after.checks == ()


def test_starting_from_zero_after_progress_is_said() -> None:
    decision = decide(group(Doing.LOCATING), idle(catalog=()), NOW)
    assert said(decision) == ["StartedFromZero"]
    assert "40 steps are done again" in decision.group.events[0].message
    assert said(decide(group(Doing.LOCATING, best_step=None), idle(catalog=()), NOW)) == []


def test_storage_that_stays_away_loses_the_group() -> None:
    decision = decide(group(Doing.LOCATING, NOW - LAUNCH_S - 1), idle(catalog_problem="OSError: EIO"), NOW)
    assert short(decision) == (Doing.CLOSING, STOP, "StorageUnavailable")
    assert (decision.group.outcome, decision.group.message) == (Outcome.LOST, "storage cannot be read: OSError: EIO")


def test_a_checkpoint_that_reads_badly_on_one_node_is_replaced_by_the_one_before() -> None:
    url = found(36).url
    seen = look(status(0, staged={url: None}), status(1, staged={url: unfit("checksum")}), catalog=(found(36), found(30)))
    decision = decide(group(Doing.STAGING, restore=RestoreOrder(Source.STORAGE, 36, url)), seen, NOW)
    assert short(decision) == (Doing.STAGING, (Stage(found(30).url),), "ReadingCheckpoint")
    assert decision.group.excluded == (found(36, "checksum"),)
    assert said(decision) == ["CheckpointSkipped"]


STAGING_36 = group(Doing.STAGING, restore=RestoreOrder(Source.STORAGE, 36, found(36).url))


def staged_36(*problems: Unfit | None) -> Seen:
    agents = [status(n, staged={found(36).url: why and unfit(f"it says {why}", why)}) for n, why in enumerate(problems)]
    return look(*agents, catalog=(found(36), found(30)))


@pytest.mark.parametrize(
    ("problems", "outcome", "reason"),
    [
        pytest.param((None, Unfit.NO_ROOM), Outcome.LOST, "NoRoomForCheckpoint", id="another node may have room"),
        pytest.param((Unfit.UNSUITED, Unfit.UNSUITED), Outcome.FAILED, "UnsuitedCheckpoint", id="of another number of ranks"),
        pytest.param((Unfit.UNREADABLE, Unfit.NO_ROOM), Outcome.LOST, "NoRoomForCheckpoint", id="the more certain one counts"),
    ],
)
def test_a_sound_checkpoint_that_cannot_be_had_is_not_called_damaged(problems: Any, outcome: Outcome, reason: str) -> None:
    """An older one would lose steps that are there."""
    decision = decide(STAGING_36, staged_36(*problems), NOW)
    assert short(decision) == (Doing.CLOSING, STOP, reason)
    assert (decision.group.outcome, decision.group.checks, decision.group.excluded) == (outcome, (), ())
    assert decision.group.message.startswith(f"step 36 at {found(36).url}: it says ")


def test_a_checkpoint_that_storage_does_not_give_is_asked_for_again_then_the_group_is_lost() -> None:
    away = staged_36(None, Unfit.UNREADABLE)
    first = decide(STAGING_36, away, NOW)
    again = decide(first.group, away, NOW + LAUNCH_S)
    for decision in (first, again):
        assert short(decision) == (Doing.STAGING, (Stage(found(36).url),), "CheckpointUnreadable")
        assert said(decision) == ["CheckpointUnreadable"]
    late = decide(again.group, away, NOW + LAUNCH_S + 0.1)
    assert short(late) == (Doing.CLOSING, STOP, "StorageUnavailable")
    assert (late.group.outcome, late.group.checks, late.group.excluded) == (Outcome.LOST, (), ())
    assert short(decide(again.group, staged_36(None, None), NOW + 50))[0] == Doing.LAUNCHING
    assert decide(again.group, staged_36(None, None), NOW + 50).group.away_since is None


def test_staging_waits_for_every_node() -> None:
    url = found(30).url
    decision = decide(group(Doing.STAGING, restore=STORAGE_30), look(status(0, staged={url: None}), status(1)), NOW)
    assert short(decision) == (Doing.STAGING, (Stage(url),), "ReadingCheckpoint")


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


def test_a_folder_that_belongs_to_another_ends_the_attempt_with_the_reason() -> None:
    decision = decide(group(Doing.LOCATING), idle(refused="/s belongs to job b"), NOW)
    assert short(decision) == (Doing.CLOSING, STOP, "StorageRefused")
    assert (decision.group.outcome, decision.group.message) == (Outcome.FAILED, "/s belongs to job b")


def test_what_was_read_and_does_not_hold_is_known_as_damaged() -> None:
    """Also where the manifest alone tells it, so that the lists show it."""
    seen = idle(catalog=(found(36, "truncated"), found(30)), staged={found(30).url: unfit("flipped")})
    group_ = decide(group(Doing.LOCATING), seen, NOW).group
    assert {c.url: c.problem for c in group_.checks} == {found(36).url: "truncated", found(30).url: "flipped"}
    assert group_.damaged == {found(36).url, found(30).url}


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
