"""Snapshots and copies that went bad in any way: what nodes then call whole is right."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.state.peered import PER_NODE, Node, run, two_steps_after_a_memory_checkpoint, whole
from tests.workers.make import group, look, spec
from workers.checkpoint.slots import read_header
from workers.group import Doing
from workers.locating import from_peers, newest_in_memory


def corrupt(path: Path, other: Path, dice: random.Random) -> str:
    """One of the ways in which a file goes bad; says which."""
    how = dice.choice(["flip", "flip", "flip", "empty", "half", "short", "swap", "gone", "zeros"])
    size = path.stat().st_size
    at = dice.randrange(size) if dice.random() < 0.7 else dice.randrange(120)  # also in the header
    if how == "flip":
        write(path, at, bytes([path.read_bytes()[at] ^ (1 << dice.randrange(8))]))
    elif how == "swap":
        kept = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    elif how == "gone":
        path.unlink()
    elif how == "zeros":
        write(path, at, bytes(min(500, size - at)))
    else:
        os.truncate(path, {"empty": 0, "half": size // 2, "short": size - 10}[how])
    return f"{how} at {at} of {path.parent.name}/{path.name}"


def write(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 240))])
def test_corrupted_snapshots_and_copies_give_the_newest_state_that_is_left(shm: Path, seed: int) -> None:
    """Up to four files of both nodes are damaged. What the nodes then call whole is right, and no older than intact files allow."""
    dice = random.Random(seed)
    nodes = two_steps_after_a_memory_checkpoint(shm, 2)
    before = {path: path.read_bytes() for node in nodes for path in node.shm.glob("**/snap-*")}
    headers = {path: read_header(path) for path in before}
    told = []
    for _ in range(dice.randint(1, 4)):
        files = sorted(path for path in before if path.exists() and path.stat().st_size)
        told.append(corrupt(*dice.sample(files, 2), dice))
    intact = {(h.step, h.rank, path.parent) for path, h in headers.items() if h and path.exists() and path.read_bytes() == before[path]}
    step = run(settle(nodes))
    assert (step or 0) >= newest_left(nodes, intact), told
    if step is not None:
        assert step in (41, 42, 43), told
        for node in nodes:
            node.check(step)


def newest_left(nodes: list[Node], intact: set[tuple[int, int, Path]]) -> int:
    """The newest step of which intact files hold every rank's own part and every part of the shared arrays; 0: none."""
    homes = {rank: node.shm for node in nodes for rank in node.ranks}

    def left(step: int) -> bool:
        whole = {rank for s, rank, folder in intact if s == step and folder.is_relative_to(homes[rank])}
        held = {rank for s, rank, _ in intact if s == step}
        return held == set(homes) and {rank % PER_NODE for rank in whole} == set(range(PER_NODE))

    return max((step for step in (41, 42, 43) if left(step)), default=0)


async def settle(nodes: list[Node]) -> int | None:
    """What the rule does until some step is whole; None: nothing is left."""
    unfetched: tuple[int, ...] = ()
    for _ in range(5):
        seen = look(*(node.status() for node in nodes))
        state = group(Doing.LOCATING, given=spec(len(nodes), processes_per_node=PER_NODE), unfetched=unfetched)
        found = from_peers(state, seen)
        if found is None:
            return newest_in_memory(state, seen)
        for node in nodes:
            node.done.clear()
            await node.exchange.fetch(found.step, found.fetches)
        for node in nodes:
            if any(f.rank in node.ranks for f in found.fetches):
                await asyncio.wait_for(node.done.wait(), 20)
        if whole(nodes, found.step):
            return found.step
        assert any(found.step in node.exchange.unfetched for node in nodes)
        unfetched += (found.step,)
    raise AssertionError("it does not come to an end")
