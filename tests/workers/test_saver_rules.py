"""What the saver does about storage that fails, hangs or answers late, and about generations that end meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.make import GENERATION, group, look, rank, spec, status
from workers import saving
from workers.checkpoint.catalog import catalog
from workers.checkpoint.format import Share, Tree
from workers.checkpoint.trial import RestoreTrial
from workers.checkpoint.writer import GivenUp, commit
from workers.group import Doing, Group, Seen
from workers.messages import CheckpointRecord
from workers.mirroring import Mirror
from workers.pacing import RETRY_MAX_S, RETRY_S, pause, step_to_ask
from workers.saving import Saver

SHARE = asdict(Share(0, [0], [], Tree({"step": 40}, []), {}, {}, 0.0))


class Site:
    """One agent, which does nothing but answer ``answers[order]``, or None."""

    def __init__(self, storage: Path, **changes: Any) -> None:
        self.spec = spec(nodes=1, storage_url=str(storage), **changes)
        self.group: Group = group(Doing.TRAINING, given=self.spec, training=True, started_at=time.time())
        self.orders: list[tuple[Any, ...]] = []
        self.answers: dict[str, Callable[[], Any]] = {"write_share": lambda: SHARE, "try_restore": lambda: RestoreTrial(0.1, compared=True)}
        mirror = Mirror(self.spec, self.call, lambda: self.group, self.update, time.time)
        self.saver = Saver(self.spec, self.call, lambda: self.group, self.update, self.seen, mirror, time.time)
        self.pinned: int | None = None

    def update(self, group: Group) -> None:
        self.group = group

    async def call(self, order: str, *args: Any) -> dict[int, Any]:
        self.orders.append((order, *args))
        answer = self.answers.get(order, lambda: None)()
        return {0: await answer if asyncio.iscoroutine(answer) else answer}

    def seen(self) -> Seen:
        return look(status(0, rank(0), pinned={} if self.pinned is None else {0: self.pinned}))

    async def look(self, pinned: int | None, later: float = 0.0) -> list[tuple[Any, ...]]:
        """The orders that a look leads to."""
        self.pinned, before = pinned, len(self.orders)
        self.saver.look(self.seen(), time.time() + later)
        if self.saver.task is not None:
            await asyncio.wait_for(self.saver.task, 10)
        return self.orders[before:]

    def told(self) -> list[str]:
        return [e.reason for e in self.group.events]

    def steps(self) -> list[int]:
        return [c.step for c in catalog(self.spec.storage_url) if c.problem is None]


def test_pauses_grow() -> None:
    assert [pause(n) for n in range(4)] == [0.0, RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert pause(2000) == RETRY_MAX_S


def fails() -> None:
    raise OSError("no")


def test_a_checkpoint_that_fails_is_not_tried_again_at_once(tmp_path: Path) -> None:
    """By time and by steps: an event each time would push all others out of the list."""

    async def run() -> None:
        site = Site(tmp_path, every_seconds=5.0)
        site.answers["write_share"] = fails
        assert await site.look(None, later=6) == [("request_checkpoint", 42)]
        assert ("write_share", 40, GENERATION) in await site.look(40)
        assert await site.look(41) == [("unpin", 41)]
        assert await site.look(None, later=RETRY_S - 1) == []
        site.saver.asked = (-1, 0)
        assert await site.look(None, later=RETRY_S - 1) == []
        assert await site.look(None, later=RETRY_S + 1) == [("request_checkpoint", 42)]
        assert ("write_share", 42, GENERATION) in await site.look(42, later=RETRY_S + 1)
        assert await site.look(43, later=RETRY_S + 1) == [("unpin", 43)]
        assert site.told() == ["CheckpointFailed", "CheckpointFailed"]
        site.answers["write_share"] = lambda: SHARE
        await site.look(44, later=3 * RETRY_S)
        assert (site.steps(), site.saver.failures) == ([44], 0)

    asyncio.run(run())


FAILED = {"doing": Doing.STOPPING}


@pytest.mark.parametrize("change", [{"doing": Doing.STOPPING}, {"doing": Doing.LOCATING}, {"generation": GENERATION + 1}])
def test_a_generation_that_has_failed_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """The next one may go back behind that step."""
    monkeypatch.setattr(saving, "LOOK_S", 0.01)

    async def run() -> None:
        site = Site(tmp_path)

        async def slowly() -> Any:
            site.update(replace(site.group, **change))
            await asyncio.sleep(20)

        site.answers["write_share"] = slowly
        orders = await site.look(40)
        assert ("abandon_share", 40) in orders
        assert (site.told(), site.steps(), site.saver.retry_at) == (["CheckpointFailed"], [], 0.0)

    asyncio.run(run())


def test_the_manifest_is_not_written_once_nobody_wants_it(tmp_path: Path) -> None:
    share = Share(0, [0], [], Tree({"step": 40}, []), {}, {}, 0.0)
    with pytest.raises(GivenUp, match="generation 3 ended before the commit"):
        commit(str(tmp_path), "job-x", 1, 3, 40, 1, [share], 1.0, 2.0, wanted=lambda: False)
    assert catalog(str(tmp_path)) == []


def test_a_mark_that_cannot_be_written_does_not_make_a_checkpoint_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        (tmp_path / "checkpoints" / "committed").mkdir(parents=True)
        monkeypatch.setattr("workers.checkpoint.storage.LocalFolder.size", unmarked)
        await site.look(40)
        assert (site.told(), site.steps()) == (["CheckpointCommitted", "RestoreTested"], [40])

    from workers.checkpoint.storage import LocalFolder

    size = LocalFolder.size

    def unmarked(self: LocalFolder, name: str) -> int | None:
        return None if name == "committed" else size(self, name)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("hangs_before_the_manifest", "meanwhile", "left"),
    [
        pytest.param(True, {}, [], id="before the manifest: nothing is left"),
        pytest.param(False, {}, [40], id="after it: the checkpoint exists, and is told"),
        pytest.param(False, FAILED, [], id="but not where its generation has failed"),
    ],
)
def test_a_commit_that_comes_back_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_before_the_manifest: bool, meanwhile: dict[str, Any], left: list[int]
) -> None:
    """No save is begun while it hangs, so that threads do not pile up; its files stay until nobody is at them any more."""
    monkeypatch.setattr(saving, "STALL_S", 0.2)
    monkeypatch.setattr(saving, "DISCARD_S", 0.1)
    monkeypatch.setattr("workers.pacing.RETRY_S", 0.0)
    released = threading.Event()

    def slow(*whole: Any, wanted: Callable[[], bool]) -> CheckpointRecord:
        if hangs_before_the_manifest:
            released.wait(20)
        record = commit(*whole, wanted=wanted)
        released.wait(20)
        return record

    monkeypatch.setattr(saving, "commit", slow)

    async def run() -> None:
        site = Site(tmp_path)
        await site.look(40)
        assert site.told() == ["CheckpointStalled"]
        threads = threading.active_count()
        for step in (41, 42):
            assert await site.look(step, later=99) == [("unpin", step)]
        assert threading.active_count() == threads
        site.update(replace(site.group, **meanwhile))
        released.set()
        assert site.saver._tidying is not None
        await asyncio.wait_for(site.saver._tidying, 10)
        assert (site.steps(), [c.step for c in site.group.checkpoints]) == (left, left)
        if not meanwhile:
            await site.look(43, later=99)
            assert site.steps() == [43, *left]

    asyncio.run(run())


def test_nothing_is_removed_while_the_newest_does_not_restore(tmp_path: Path) -> None:
    """Its bytes may read back whole all the same."""

    async def run() -> None:
        site = Site(tmp_path, keep_last=2)
        for step in (10, 20, 30):
            commit(str(tmp_path), "job-x", 1, 2, step, 1, [Share(0, [0], [], Tree({}, []), {}, {}, 0.0)], 1.0, 2.0)
        site.answers["try_restore"] = lambda: RestoreTrial(0.1, "it is not the snapshot", damaged=True)
        await site.look(40)
        await site.look(50)
        assert site.told().count("RestoreTestFailed") == 2
        assert [c.problem for c in site.group.checks] == ["it is not the snapshot"] * 2
        assert len(site.steps()) == 5
        assert site.group.checkpoint_step is None
        site.answers["try_restore"] = lambda: RestoreTrial(0.1, compared=True)
        await site.look(60)
        assert 60 in site.steps()
        assert len(site.steps()) < 5

    asyncio.run(run())


def test_steps_that_are_done_again_are_saved_too() -> None:
    """A job that loses nodes more often than it can redo the steps in between would never advance."""
    given = spec(nodes=1, every_seconds=5.0)
    before = group(Doing.TRAINING, given=given, best_step=90)
    now = 1_000.0
    again = (rank(0, step=30, step_seconds=0.1, first_step_at=now - 6, new_step_at=None),)
    assert before.started_at is None
    assert step_to_ask(before, again, (-1, 0), now) == 40
    assert step_to_ask(before, again, (GENERATION, 40), now) is None
    assert step_to_ask(before, again, (-1, 0), now - 2) is None
