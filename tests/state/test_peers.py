"""Nodes make each other's snapshots whole: the state is the same bit for bit, or it is refused."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.state.peered import (
    GENERATION,
    PER_NODE,
    Node,
    fetch,
    mirror,
    own,
    plan,
    run,
    shared,
    start,
    two_steps_after_a_memory_checkpoint,
    whole,
)
from workers import cgroups
from workers import exchange as exchanging
from workers.checkpoint import peers, room
from workers.checkpoint.peers import OWN, SHARED, offer
from workers.checkpoint.slots import COMPLETE
from workers.exchange import Exchange
from workers.messages import Offer


@pytest.fixture(params=[peers.CHUNK, 1000])
def nodes(shm: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Two nodes of two ranks at step 40, with pieces larger than a part and smaller."""
    monkeypatch.setattr(peers, "CHUNK", request.param)
    return start(shm, 2)


def test_damaged_shared_parts_are_written_anew_from_the_other_node(nodes: list[Node]) -> None:
    """Each node lost another half of the shared arrays, so only together they have all of them."""
    for rank in (0, 3):
        nodes[rank // PER_NODE].damage(rank, 40, SHARED)
    assert not whole(nodes, 40)
    assert run(fetch(nodes)) == 40
    assert whole(nodes, 40)
    for node in nodes:
        node.check(40)


def test_a_node_whose_memory_is_gone_goes_on_from_its_guards_copy(nodes: list[Node]) -> None:
    for node in nodes:
        node.step(41, pin=True)
    assert run(mirror(nodes, 41)) == [None] * 4
    for step in (42, 43, 44):
        for node in nodes:
            node.step(step)
    shutil.rmtree(nodes[1].shm)
    nodes[1].shm.mkdir()
    assert run(fetch(nodes)) == 41
    assert whole(nodes, 41)
    for node in nodes:
        node.check(41)
        node.writers = [node._writer(rank, 4, restored=41) for rank in node.ranks]  # the next generation goes on from there
        assert {writer.newest for writer in node.writers} == {41}
        node.step(42)
        node.check(41)
        node.check(42)


def test_only_what_is_lost_is_fetched_when_the_copy_is_of_the_newest_step(nodes: list[Node]) -> None:
    for node in nodes:
        node.step(41, pin=True)
    run(mirror(nodes, 41))
    nodes[1].slot(3, 41)[0].unlink()
    assert [f.rank for f in plan(nodes).fetches] == [3]
    assert run(fetch(nodes)) == 41
    nodes[1].check(41)


def test_a_copy_is_offered_before_the_slot_that_its_rank_may_write_over(nodes: list[Node]) -> None:
    for node in nodes:
        node.step(41, pin=True)
    run(mirror(nodes, 41))
    for rank in nodes[0].ranks:
        given = offer(nodes[0].shm, nodes[0].ranks, rank, 41, OWN)
        assert given is not None
        assert given.name.startswith("copies-41/")


@pytest.mark.parametrize("part", [SHARED, OWN])
def test_damaged_copies_are_not_given(shm: Path, part: str) -> None:
    """Of three nodes: another one's replica stands in for a damaged shared part, nobody's for what is a rank's own."""
    nodes = two_steps_after_a_memory_checkpoint(shm, 3)
    shutil.rmtree(nodes[1].shm)
    nodes[1].shm.mkdir()
    giver = nodes[2]  # guards node 1, and is the first to be asked for the shared arrays
    giver.damage(2, 41, part, giver.shm / "copies-41" / f"snap-{2 if part == OWN else 4}-0")
    assert run(fetch(nodes)) == 41
    if part == SHARED:
        assert not nodes[1].exchange.unfetched
        nodes[1].check(41)
    else:
        assert "no sound copy of what is rank 2's own" in nodes[1].exchange.unfetched[41]
        assert not whole(nodes, 41)


def test_a_replica_with_other_bits_is_refused(nodes: list[Node]) -> None:
    for rank, writer in zip(nodes[1].ranks, nodes[1].writers, strict=True):
        writer.write(40, shared(41), own(40, rank), pin=False)
    nodes[0].damage(0, 40, SHARED)
    run(fetch(nodes))
    assert "not the same, bit for bit" in nodes[0].exchange.unfetched[40]
    assert not whole(nodes, 40)


class Damaging:
    """A way between two nodes on which one byte of every piece is flipped."""

    def __init__(self, other: Exchange) -> None:
        self.offer = other.offer
        self._give = other.give

    async def give(self, name: str, at: int, size: int) -> Any:
        data = (await self._give(name, at, size)).copy()
        data[size // 2] ^= 1
        return data


def test_what_was_damaged_on_the_way_does_not_count(nodes: list[Node]) -> None:
    nodes[0].reach = Damaging
    nodes[0].damage(0, 40, SHARED)
    run(fetch(nodes))
    assert "does not match its checksum" in nodes[0].exchange.unfetched[40]
    assert not whole(nodes, 40)
    for node in nodes:
        node.step(41, pin=True)
    nodes[0].reach = lambda other: other
    run(mirror(nodes, 41))
    shutil.rmtree(nodes[1].shm)
    nodes[1].shm.mkdir()
    nodes[1].reach = Damaging
    run(fetch(nodes))
    assert "rank 2's own was damaged on the way" in nodes[1].exchange.unfetched[41]
    assert not whole(nodes, 41)


def test_a_copy_that_was_damaged_on_the_way_is_no_copy(nodes: list[Node]) -> None:
    nodes[0].reach = Damaging
    for node in nodes:
        node.step(41, pin=True)
    said = run(mirror(nodes, 41))
    assert "damaged on the way" in said[2]
    assert not peers.copies(nodes[0].shm, nodes[0].ranks)


class Away:
    """Another agent that cannot be reached at first."""

    def __init__(self, other: Exchange, left: list[int]) -> None:
        self._other, self._left = other, left
        self.give = other.give

    async def offer(self, rank: int, step: int, part: str) -> Offer | None:
        if self._left:
            self._left.pop()
            raise ConnectionError("away")
        return await self._other.offer(rank, step, part)


def test_an_agent_that_returns_is_asked_again(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "AGAIN_S", 0.01)
    left = [1, 2, 3]
    nodes[0].reach = lambda other: Away(other, left)
    nodes[0].damage(0, 40, SHARED)
    run(fetch(nodes))
    assert not left
    nodes[0].check(40)


def test_an_agent_that_does_not_return_is_given_up(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "AGAIN_S", 0.01)
    monkeypatch.setattr(exchanging, "RETURN_S", 0.1)
    nodes[0].reach = lambda other: Away(other, [1] * 10**6)
    nodes[0].damage(0, 40, SHARED)
    run(fetch(nodes))
    assert nodes[0].exchange.unfetched == {40: "away"}


class Stuck(Damaging):
    def __init__(self, other: Exchange, asked: asyncio.Event) -> None:
        super().__init__(other)
        self._asked = asked

    async def give(self, name: str, at: int, size: int) -> Any:
        self._asked.set()
        await asyncio.sleep(3600)


def test_a_fetch_that_is_ended_writes_nothing_more(nodes: list[Node]) -> None:
    async def work() -> None:
        for node in nodes:
            node.step(41, pin=True)
        await mirror(nodes, 41)
        nodes[1].slot(2, 41)[0].unlink()
        asked = asyncio.Event()
        nodes[1].reach = lambda other: Stuck(other, asked)
        found = plan(nodes)
        await nodes[1].exchange.fetch(found.step, [type(f)(f.rank, (0,), f.shared) for f in found.fetches])
        await asked.wait()
        await nodes[1].exchange.end_fetch()
        assert not whole(nodes, 41)
        path, header = nodes[1].slot(2, 41)
        assert header.state != COMPLETE
        before = path.read_bytes()
        await asyncio.sleep(0)
        assert path.read_bytes() == before

    run(work())


def test_a_guard_holds_no_memory_for_shared_arrays(shm: Path) -> None:
    nodes = start(shm, 2)
    for node in nodes:
        for rank, writer in zip(node.ranks, node.writers, strict=True):
            writer.write(41, {"w": np.ones(1 << 20), "v": np.ones(1 << 20)}, own(41, rank), pin=True)
    assert run(mirror(nodes, 41)) == [None] * 4
    guarded = nodes[0].shm / "copies-41" / "snap-2-0"
    assert run(nodes[0].exchange.offer(2, 41, OWN)) is not None
    assert run(nodes[0].exchange.offer(2, 41, SHARED)) is None
    assert guarded.stat().st_size > 8 << 20
    assert guarded.stat().st_blocks * 512 < 64 << 10


def test_older_memory_checkpoints_go_when_a_newer_one_is_complete(nodes: list[Node]) -> None:
    async def work() -> None:
        for step, complete in ((41, None), (42, 41)):
            for node in nodes:
                node.step(step, pin=True)
            await mirror(nodes, step, complete)
            assert {c.step for c in peers.copies(nodes[0].shm, [0, 1])} == {step, complete} - {None}
        for node in nodes:
            node.exchange.drop({42})
        assert {c.step for c in peers.copies(nodes[0].shm, [0, 1])} == {42}
        nodes[0].exchange.drop_newer(42)
        assert peers.copies(nodes[0].shm, [0, 1])
        nodes[0].exchange.drop_newer(41)
        assert not peers.copies(nodes[0].shm, [0, 1])

    run(work())


def test_copies_of_a_generation_that_has_ended_are_thrown_away(nodes: list[Node]) -> None:
    for node in nodes:
        node.step(41, pin=True)
        node.trains = False
    assert all(said and "ended" in said for said in run(mirror(nodes, 41))[:2])
    assert not list(nodes[0].shm.glob("copies-*"))


def test_no_copy_where_memory_is_short(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    for node in nodes:
        node.step(41, pin=True)
    monkeypatch.setattr(exchanging, "free_bytes", lambda shm: 50_000)
    said = run(nodes[0].exchange.copy(41, GENERATION, None))
    assert "50000 are" in said
    assert "more memory" in said
    assert not list(nodes[0].shm.glob("copies-*"))


def test_room_is_what_folder_machine_and_control_groups_leave(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < room.free_bytes(shm) <= shutil.disk_usage(shm).free
    for folder in (tmp_path, tmp_path / "memory"):  # where version 2 and version 1 have the root of a container
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text("9000\n")
        (folder / "memory.current").write_text("4000\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    assert room.free_bytes(shm) == 5000
    for folder in (tmp_path, tmp_path / "memory"):
        (folder / "memory.stat").write_text("anon 3000\ninactive_file 700\n")
    assert room.free_bytes(shm) == 5700


@pytest.mark.parametrize("name", ["../secret", "copies-1/../snap-0-0", "launcher.json", "snap-0-0/x"])
def test_nothing_but_snapshots_is_given(shm: Path, name: str) -> None:
    with pytest.raises(peers.StateError, match="is no snapshot"):
        peers.read(shm, name, 0, 1)
