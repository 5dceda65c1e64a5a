"""Nodes with shared memory, snapshots and an exchange, without Ray and without processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.workers.make import group, look, spec, status
from workers.checkpoint import peers
from workers.checkpoint.peers import SHARED
from workers.checkpoint.reader import read_snapshot
from workers.checkpoint.slots import Header, holdings, read_header, slot_path, unpin
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.exchange import Exchange
from workers.group import Doing
from workers.locating import from_peers, whole_in_memory

PER_NODE = 2
GENERATION = 3


def shared(step: int) -> dict[str, Any]:
    return {
        "model": {f"w{i}": np.arange(500 * (i + 1), dtype=np.float32) * step for i in range(5)},
        "odd": np.ones(3, np.uint8),
        "lr": step / 7,
    }


def own(step: int, rank: int) -> dict[str, Any]:
    return {"parts": {"data": {"sample": step}}, "random": np.arange(300) * step + rank}


class Node:
    """A node's shared memory, its ranks' snapshots and its agent's exchange; ``reach`` stands between it and the others."""

    def __init__(self, index: int, shm: Path, nodes: list[Node], count: int) -> None:
        self.index, self.shm = index, shm
        self.ranks = [index * PER_NODE + i for i in range(PER_NODE)]
        self.writers = [self._writer(rank, count * PER_NODE, restored=0) for rank in self.ranks]
        self.trains = True
        self.reach: Callable[[Exchange], Any] = lambda other: other
        self.exchange = Exchange(
            shm, index, count, self.ranks, lambda node: self.reach(nodes[node].exchange), lambda generation: self.trains, self._fetched
        )
        self.done = asyncio.Event()

    def _writer(self, rank: int, world_size: int, restored: int) -> SnapshotWriter:
        self.shm.mkdir(exist_ok=True)
        return SnapshotWriter(self.shm, Place(rank, world_size, rank % PER_NODE, PER_NODE, GENERATION), restored)

    async def _fetched(self, ranks: Sequence[int], step: int | None) -> None:
        self.done.set()

    def step(self, step: int, pin: bool = False) -> None:
        for rank, writer in zip(self.ranks, self.writers, strict=True):
            writer.write(step, shared(step), own(step, rank), pin)

    def status(self) -> Any:
        held = tuple(holdings(self.shm, self.ranks, verify=True))
        return status(self.index, holdings=held, copies=peers.copies(self.shm, self.ranks), unfetched=dict(self.exchange.unfetched))

    def slot(self, rank: int, step: int) -> tuple[Path, Header]:
        found = [(slot_path(self.shm, rank, n), read_header(slot_path(self.shm, rank, n))) for n in range(3)]
        return next((path, header) for path, header in found if header is not None and header.step == step)

    def damage(self, rank: int, step: int, part: str, path: Path | None = None) -> None:
        slot, header = self.slot(rank, step) if path is None else (path, read_header(path))
        assert header is not None
        arrays, _ = header.shared_sections() if part == SHARED else header.own_sections()
        with open(slot, "r+b") as file:
            file.seek(arrays.stop - 40)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    def check(self, step: int) -> None:
        """Every rank of this node reads what it had at ``step``."""
        for rank in self.ranks:
            found = read_snapshot(self.shm, rank, self.ranks, step)
            assert found.step == step
            assert found.shared["lr"] == step / 7
            assert found.own["parts"] == own(step, rank)["parts"]
            assert found.own["random"].tobytes() == own(step, rank)["random"].tobytes()
            for name, value in shared(step)["model"].items():
                assert found.shared["model"][name].tobytes() == value.tobytes()


def start(shm: Path, count: int) -> list[Node]:
    made: list[Node] = []
    made.extend(Node(i, shm / f"node{i}", made, count) for i in range(count))
    for node in made:
        node.step(39)
        node.step(40)
    return made


async def mirror(nodes: list[Node], step: int, complete: int | None = None) -> list[str | None]:
    """What a coordinator orders for a memory checkpoint; ranks have pinned the step."""
    said = [await node.exchange.copy(step, GENERATION, complete) for node in nodes]
    said += [await node.exchange.guard(step, GENERATION, complete) for node in nodes]
    for node in nodes:
        unpin(node.shm, node.ranks, step)
    return said


def plan(nodes: list[Node]) -> Any:
    """What the rule makes of what the nodes hold."""
    seen = look(*(node.status() for node in nodes))
    return from_peers(group(Doing.LOCATING, given=spec(len(nodes), processes_per_node=PER_NODE)), seen)


async def fetch(nodes: list[Node]) -> int:
    """Find the newest step that the nodes can make whole, and let them do it; returns it."""
    found = plan(nodes)
    assert found is not None
    for node in nodes:
        await node.exchange.fetch(found.step, found.fetches)
    for node in nodes:
        if any(f.rank in node.ranks for f in found.fetches):
            await asyncio.wait_for(node.done.wait(), 20)
            await node.exchange.end_fetch()
    return int(found.step)


def whole(nodes: list[Node], step: int) -> bool:
    seen = look(*(node.status() for node in nodes))
    return whole_in_memory(group(Doing.FETCHING, given=spec(len(nodes), processes_per_node=PER_NODE)), seen, step)


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(limited())


def two_steps_after_a_memory_checkpoint(shm: Path, count: int) -> list[Node]:
    """Step 41 is copied and guarded, snapshots of 42 and 43 are in the slots."""
    nodes = start(shm, count)
    for node in nodes:
        node.step(41, pin=True)
    run(mirror(nodes, 41))
    for node in nodes:
        node.step(42)
        node.step(43)
    return nodes
