"""Where the state of the next generation comes from: what nodes and storage hold -> what is taken, read or given up, and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.make import (
    MEMORY_40,
    NOTHING,
    NOW,
    STOP,
    STORAGE_30,
    committed,
    found,
    group,
    idle,
    launch,
    look,
    said,
    short,
    spec,
    status,
    unfit,
    with_memory,
)
from workers.failing import LAUNCH_S
from workers.group import Doing, ReadCatalog, Seen, Stage
from workers.messages import Outcome, RestoreOrder, Source, Unfit
from workers.restart import decide


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
    assert (decision.group.outcome, decision.group.message) == (Outcome.LOST, "storage cannot be used: OSError: EIO")


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


@pytest.mark.parametrize(("given", "made"), [(spec(committed_step=30), ()), (spec(), (committed(30),))])
def test_storage_that_has_lost_all_checkpoints_is_no_reason_to_start_from_zero(given: Any, made: Any) -> None:
    after = decide(group(Doing.LOCATING, given=given, checkpoints=made), idle(catalog=()), NOW).group
    assert (after.outcome, after.reason) == (Outcome.FAILED, "NoValidCheckpoint")
    assert "though one of step 30 was committed" in after.message


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
