"""200 corruptions of snapshots, copies of them on other nodes, and checkpoints: every one is found, and the newest state that is left is
taken, bit for bit. Where none is left, the job fails with the list.

Real files, real readers and the real rule: the driver below does for it what a coordinator and agents do.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.make import NOW, group, look, spec, status
from workers.checkpoint import peers
from workers.checkpoint import writer as writing
from workers.checkpoint.catalog import stage
from workers.checkpoint.format import FOLDER, folder_name
from workers.checkpoint.reader import Restored, read_snapshot, read_staged
from workers.checkpoint.slots import holdings, read_header, slot_path, unpin
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.checkpoint.writer import commit, write_share
from workers.exchange import Exchange
from workers.group import Decision, Doing, FetchPeers, Group, Launch, ReadCatalog, Stage
from workers.listing import read_catalog
from workers.messages import GroupSpec, Outcome, Problem, RestoreOrder, Source
from workers.restart import decide

NODES, PER_NODE = 2, 2
WORLD = NODES * PER_NODE
CASES = 200
# Newest first: two snapshots in the slots, the copies of step 30, the checkpoints.
STATES = [(40, "slots"), (39, "slots"), (30, "copies"), (30, "storage"), (20, "storage"), (10, "storage")]


def shared(step: int) -> dict[str, Any]:
    return {"model": {f"w{i}": np.arange(400 * (i + 1), dtype=np.float32) * step for i in range(4)}, "lr": step / 7}


def own(step: int, rank: int) -> dict[str, Any]:
    return {"parts": {"data": {"sample": step}}, "random": np.arange(300) * step + rank}


def ranks_of(node: int) -> list[int]:
    return [node * PER_NODE + i for i in range(PER_NODE)]


class Site:
    """What is left on nodes and in storage of a job that trained to step 40."""

    def __init__(self, home: Path) -> None:
        self.home, self.storage = home, home / "storage"
        self.shm = [home / f"node{n}" for n in range(NODES)]
        self.exchanges: list[Exchange] = []

    def train(self) -> None:
        writers = {}
        for node, shm in enumerate(self.shm):
            shm.mkdir()
            writers |= {r: SnapshotWriter(shm, Place(r, WORLD, r % PER_NODE, PER_NODE, 3), 0) for r in ranks_of(node)}
        for step in (10, 20, 30):
            self._write(writers, step, pin=True)
            shares = [write_share(shm, str(self.storage), step, 1, 3, n, NODES, ranks_of(n)) for n, shm in enumerate(self.shm)]
            commit(str(self.storage), "job-x", 1, 3, step, WORLD, shares, 1.0, 2.0)
            if step == 30:
                asyncio.run(self._mirror(step))
            for shm in self.shm:
                unpin(shm, range(WORLD), step)
        for step in (38, 39, 40):
            self._write(writers, step, pin=False)

    def _write(self, writers: dict[int, SnapshotWriter], step: int, pin: bool) -> None:
        for rank, writer in writers.items():
            writer.write(step, shared(step), own(step, rank), pin)

    def connect(self) -> None:
        async def fetched(ranks: Sequence[int], step: int | None) -> None:
            return None

        self.exchanges = [
            Exchange(shm, n, NODES, ranks_of(n), lambda node: self.exchanges[node], lambda generation: True, fetched)
            for n, shm in enumerate(self.shm)
        ]

    async def _mirror(self, step: int) -> None:
        self.connect()
        assert [await e.copy(step, 3, None) for e in self.exchanges] == [None] * NODES
        assert [await e.guard(step, 3, None) for e in self.exchanges] == [None] * NODES

    def checkpoint(self, step: int) -> Path:
        return self.storage / FOLDER / folder_name(step, 1, 3)

    def slot(self, rank: int, step: int) -> Path:
        paths = [slot_path(self.shm[rank // PER_NODE], rank, n) for n in range(3)]
        return next(p for p in paths if (header := read_header(p)) is not None and header.step == step and header.complete)


# damage, to a file each

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, dice: random.Random, start: int = 0) -> None:
    at = dice.randrange(start, path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << dice.randrange(8))]))


def empty(path: Path, dice: random.Random) -> None:
    os.truncate(path, 0)


def half(path: Path, dice: random.Random) -> None:
    os.truncate(path, path.stat().st_size // 2)


def ten_short(path: Path, dice: random.Random) -> None:
    os.truncate(path, path.stat().st_size - 10)


FILE: tuple[Damage, ...] = (flip, empty, half, ten_short)


def damage_checkpoint(folder: Path, dice: random.Random) -> str:
    """One of the ways in which a checkpoint can be spoilt."""
    files = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    what = dice.choice(["file", "file", "manifest", "swap", "no manifest", "empty folder", "manifest only", "one missing"])
    match what:
        case "file":
            dice.choice(FILE)(dice.choice(files), dice)
        case "manifest":
            dice.choice((flip, empty, half))(folder / "manifest.json", dice)
        case "swap":
            one, other = dice.sample([p for p in files if p.name.startswith("rank-")], 2)
            spare = folder / "spare"
            one.rename(spare), other.rename(one), spare.rename(other)
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "empty folder":
            for path in folder.iterdir():
                path.unlink()
        case "manifest only":
            for path in files:
                path.unlink()
        case "one missing":
            dice.choice(files).unlink()
    return what


def damage_own(path: Path, dice: random.Random) -> None:
    """Spoil what is a rank's own in a slot or a copy: no other node can make that whole."""
    header = read_header(path)
    assert header is not None
    match dice.choice(["flip", "flip", "description", "cut", "empty", "gone", "header"]):
        case "flip":
            arrays, _ = header.own_sections()
            _flip_within(path, dice, arrays)
        case "description":
            _, text = header.own_sections()
            _flip_within(path, dice, text)
        case "cut":
            arrays, text = header.own_sections()
            os.truncate(path, max(arrays.stop, text.stop) - 10)
        case "empty":
            os.truncate(path, 0)
        case "gone":
            path.unlink()
        case "header":
            _flip_within(path, dice, slice(24, 40))


def _flip_within(path: Path, dice: random.Random, part: slice) -> None:
    at = dice.randrange(part.start, part.stop)
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << dice.randrange(8))]))


def destroy(site: Site, state: tuple[int, str], dice: random.Random) -> None:
    step, where = state
    rank = dice.randrange(WORLD)
    if where == "slots":
        damage_own(site.slot(rank, step), dice)
    elif where == "copies":
        for copy in [shm / f"copies-{step}" / f"snap-{rank}-0" for shm in site.shm]:
            if copy.exists():
                damage_own(copy, dice)
    else:
        damage_checkpoint(site.checkpoint(step), dice)


# the rule, with what a coordinator and its agents do for it


class Driver:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.spec: GroupSpec = spec(NODES, processes_per_node=PER_NODE, storage_url=str(site.storage))
        self.group: Group = replace(group(Doing.LOCATING, given=self.spec), generation=3)
        self.staged: dict[int, dict[str, Problem | None]] = {n: {} for n in range(NODES)}
        self.seen: dict[str, Any] = {}

    def statuses(self) -> list[Any]:
        return [
            status(
                n,
                holdings=tuple(holdings(shm, ranks_of(n), verify=True)),
                copies=peers.copies(shm, ranks_of(n)),
                unfetched=dict(self.site.exchanges[n].unfetched),
                staged=dict(self.staged[n]),
            )
            for n, shm in enumerate(self.site.shm)
        ]

    async def run(self) -> Decision:
        self.site.connect()
        for turn in range(60):
            decision = decide(self.group, look(*self.statuses(), **self.seen), NOW + turn * 0.01)
            self.group = decision.group
            if self.group.outcome is not None or any(isinstance(a, Launch) for a in decision.actions):
                return decision
            for action in decision.actions:
                await self._do(action)
        raise AssertionError(f"no decision: {self.group.doing} {[e.message for e in self.group.events]}")

    async def _do(self, action: Any) -> None:
        match action:
            case ReadCatalog():
                found, past = read_catalog(self.spec, self.group.generation)
                self.seen |= {"catalog": found, "past_generation": past}
            case Stage(url):
                for n, shm in enumerate(self.site.shm):
                    self.staged[n].setdefault(url, stage(url, shm, "staged", ranks_of(n), WORLD))
            case FetchPeers(step, fetches):
                for exchange in self.site.exchanges:
                    await exchange.fetch(step, fetches)
                for exchange in self.site.exchanges:
                    if exchange._fetch is not None:
                        await asyncio.wait([exchange._fetch])
            case _:
                raise AssertionError(f"not expected here: {action}")

    def restored(self, order: RestoreOrder, rank: int) -> Restored:
        shm = self.site.shm[rank // PER_NODE]
        if order.source == Source.STORAGE:
            return read_staged(shm / "staged", rank, WORLD)
        return read_snapshot(shm, rank, ranks_of(rank // PER_NODE), order.step)


def check(driver: Driver, order: RestoreOrder) -> None:
    for rank in range(WORLD):
        found = driver.restored(order, rank)
        assert found.step == order.step
        assert found.shared["lr"] == order.step / 7
        assert found.own["random"].tobytes() == own(order.step, rank)["random"].tobytes()
        for name, value in shared(order.step)["model"].items():
            assert found.shared["model"][name].tobytes() == value.tobytes()


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    Site(home).train()
    yield home
    shutil.rmtree(home)


@pytest.fixture
def site(trained: Path, shm: Path) -> Site:
    shutil.copytree(trained, shm / "site")
    return Site(shm / "site")


@pytest.mark.parametrize("seed", range(CASES))
def test_the_newest_state_that_is_left_is_taken(site: Site, seed: int) -> None:
    dice = random.Random(seed)
    left = seed % (len(STATES) + 1)  # all states before this one are destroyed
    for state in STATES[:left]:
        destroy(site, state, dice)
    if left < len(STATES):
        for state in STATES[left + 1 :]:
            if dice.random() < 0.3:  # what lies deeper does not matter
                destroy(site, state, dice)
    driver = Driver(site)
    decision = asyncio.run(driver.run())
    if left == len(STATES):
        assert (decision.group.outcome, decision.reason) == (Outcome.FAILED, "NoValidCheckpoint")
        for step in (10, 20, 30):
            assert f"step {step}: " in decision.group.message
        return
    (launch,) = [a for a in decision.actions if isinstance(a, Launch)]
    step, where = STATES[left]
    source = {"slots": Source.MEMORY, "copies": Source.PEER, "storage": Source.STORAGE}[where]
    assert (launch.restore.step, launch.restore.source) == (step, source)
    check(driver, launch.restore)


def save_slowly(shm: Path, storage: Path) -> tuple[int, int]:
    """A child that saves step 40 piece by piece: (its pid, a pipe that gets a byte for each piece and one for the commit)."""
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return pid, here

    def wrote(written: int, total: int) -> None:
        os.write(there, b".")
        time.sleep(0.002)

    try:
        share = write_share(shm, str(storage), 40, 1, 3, 0, 1, [0, 1], wrote)
        commit(str(storage), "job-x", 1, 3, 40, 2, [share], 1.0, 2.0)
        os.write(there, b"!")
    finally:
        os._exit(0)


def test_a_save_that_is_killed_at_any_moment_counts_whole_or_not_at_all(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 at 20 moments of a save: what was complete before is taken, and what was skipped is told."""
    monkeypatch.setattr(writing, "PIECE", 1024)
    for rank in (0, 1):
        writer = SnapshotWriter(shm, Place(rank, 2, rank, 2, 3), 0)
        for step in (30, 40):
            writer.write(step, shared(step), own(step, rank), pin=False)
    storage, dice, torn = tmp_path / "storage", random.Random(7), 0
    commit(str(storage), "job-x", 1, 3, 30, 2, [write_share(shm, str(storage), 30, 1, 3, 0, 1, [0, 1])], 1.0, 2.0)
    given = spec(1, processes_per_node=2, storage_url=str(storage))
    for _ in range(20):
        pid, pipe = save_slowly(shm, storage)
        said = b"".join(os.read(pipe, 1) for _ in range(dice.randrange(1, 28)))
        time.sleep(dice.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
        found, _ = read_catalog(given, 3)
        newest = next(c for c in found if c.problem is None)
        if newest.step == 40:
            assert stage(newest.url, shm, "staged", [0, 1], 2) is None
            shutil.rmtree(newest.url)
            continue
        torn += 1
        assert newest.step == 30
        assert b"!" not in said
        assert [c.step for c in found if c.problem is not None] in ([40], [])  # nothing where it was killed before the first byte
    assert 5 <= torn <= 20
