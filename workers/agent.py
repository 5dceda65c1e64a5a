"""The agent: the Ray actor on one node of a group. It owns that node's launcher, ranks, logs, snapshots and boards.

Invariants: an order of a leader with a lower term than the highest seen is refused; every order is idempotent and answers with the whole
status; an agent that has heard of no leader for longer than its lease ends its ranks, so nothing leaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.checkpoint import peers
from workers.checkpoint.background import in_thread
from workers.checkpoint.catalog import clear_staged, staged_name
from workers.checkpoint.slots import discard_newer, holdings, pinned_steps, unpin
from workers.checkpoint.trial import RestoreTrial
from workers.exchange import Exchange
from workers.group import Kept
from workers.interfaces import interface_of
from workers.kept import read_kept, write_kept
from workers.messages import (
    AgentStatus,
    Copy,
    FailureClass,
    Fetch,
    GroupSpec,
    Holding,
    LaunchOrder,
    Offer,
    RankStacks,
    Source,
)
from workers.neighbours import Neighbour
from workers.processes import SHM, TMP, adopt_orphans, end_group, remove_folders
from workers.ranks import Ranks
from workers.share_writer import ShareWriter
from workers.stacks import TAKE_S, take
from workers.staging import Staging
from workers.workdir import CannotPrepare, UnusableBundle, home_of, missing, prepare

_log = logging.getLogger(__name__)

BEAT_S = 0.5  # longest silence of a poll
LOOK_S = 0.02  # between two readings of the boards, while ranks start
STEADY_LOOK_S = 0.1  # while they train, for a reading takes a processor a millisecond; their end is told by the launcher
STRAY_LOOK_S = 0.2  # between two looks whether anybody leads this agent
LEASE_S = 60.0
PREPARE_PAUSES_S = (1.0, 4.0)  # between tries to make the working directory


class StaleLeader(Exception):
    """The order came from a coordinator that has been replaced."""


class Agent:
    def __init__(self, spec: GroupSpec, index: int, address: str, adopts: bool = False) -> None:
        """``adopts``: this process is the agent's alone, so whatever a dead launcher leaves below it may be ended."""
        self.spec, self.index, self.address = spec, index, address
        self.incarnation = uuid.uuid4().hex
        self.version = 1
        self.term = 0
        self.kept: Kept | None = None
        self._written: Kept | None = None  # what the file of the kept state holds
        self.led_at = time.monotonic()
        self.shm, self.tmp = (root / f"{spec.key}.{index}" for root in (SHM, TMP))
        self.problem: str | None = None
        self._problem_kind = FailureClass.UNKNOWN
        self.held: tuple[Holding, ...] = ()
        self.copies: tuple[Copy, ...] = ()
        self.fenced = spec.first_generation - 1  # newest generation that was ordered to stop: it must never start again
        self.surveyed = spec.first_generation - 2  # generation whose end was made sure of, and whose snapshots were verified
        self.stuck: list[int] = []
        self.pinned: dict[int, int] = {}
        self.stacks: tuple[float | None, tuple[RankStacks, ...]] = (None, ())  # the request that they answer
        self._taking: float | None = None
        self._missing: tuple[str, ...] | None = None  # of the files that success asks for
        self._change = asyncio.Event()
        self._order = asyncio.Lock()  # launch and stop, one after the other
        self._work: Path | None = None
        self._closed = False
        end_group(f"{spec.key}.{index}")  # what an earlier agent of this node left behind
        self._make_folders()
        clear_staged(self.shm)
        self.kept = self._written = read_kept(self.shm)
        self.ranks = Ranks(spec, index, self.shm, self.tmp, home_of(spec.storage_url, spec.job_id), self._changed, interface_of(address))
        if adopts:
            self.ranks.own = adopt_orphans()
        self.staging = Staging(self.shm, self.ranks.numbers, spec.world_size, spec.start_s)
        self.shares = ShareWriter(spec, index, self.shm, self.ranks.numbers)
        self.exchange = Exchange(
            self.shm,
            index,
            len(spec.nodes),
            self.ranks.numbers,
            functools.cache(lambda node: Neighbour(spec.key, node)),
            lambda generation: self.ranks.generation == generation > self.fenced and not self._closed,
            self._fetched,
        )
        self._tasks = [asyncio.create_task(t) for t in (self._prepare(), self._watch(), self._keep_lease())]

    def _changed(self) -> None:
        self.version += 1
        self._change.set()

    async def _prepare(self) -> None:
        """A disk or a storage that fails for a moment is asked again before the node counts as unfit."""
        for pause in (*PREPARE_PAUSES_S, None):
            try:
                work = await in_thread(prepare, self.spec.storage_url, self.spec.job_id, self.spec.bundle_url)
                self.ranks.start_launcher(work)
                self._work = work
                break
            except Exception as error:  # whatever storage raises
                users = isinstance(error, UnusableBundle)
                if users or pause is None:
                    self._problem_kind = FailureClass.USER if users else FailureClass.INFRASTRUCTURE
                    self.problem = f"{type(error).__name__}: {error}" if not isinstance(error, CannotPrepare) else str(error)
                    break
            await asyncio.sleep(pause)
        self._changed()

    async def _watch(self) -> None:
        """Read boards and pins; start a new launcher when the old one is gone."""
        looked_at = 0.0
        while not self._closed:
            await asyncio.sleep(LOOK_S)
            try:
                if self.ranks.living and (not self.ranks.steady or time.monotonic() - looked_at >= STEADY_LOOK_S):
                    looked_at = time.monotonic()
                    self._look()
                await self._tend()
            except Exception:  # nobody would do the rest of this task if it ended here
                _log.exception("a turn of the watch failed; the next one tries again")

    async def _tend(self) -> None:
        """What must be done as soon as there is cause for it."""
        if self.spec.success_files and self._missing is None and self.ranks.all_left and self._work is not None:
            self._missing = await asyncio.to_thread(missing, self._work, self.spec.success_files)
            self._changed()
        if self.kept is not self._written and not self._closed:
            self._written = self.kept
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_kept, self.shm, self.kept)
        if self._work is not None and not (self.ranks.launcher_lives or self.ranks.problem or self._closed):
            try:
                self._make_folders()
                self.ranks.start_launcher(self._work)
            except OSError as error:
                self.ranks.problem = f"its launcher cannot be started: {error}"
                self._changed()

    def _look(self) -> None:
        """Boards first, then pins: whoever sees a rank beyond a step must see that it pinned it."""
        with contextlib.suppress(OSError, ValueError):  # a board that is being replaced; the next look finds it whole
            self.ranks.read_boards()
        pinned = {r: s for r, s in pinned_steps(self.shm, self.ranks.numbers).items() if s is not None}
        if pinned != self.pinned:
            self.pinned = pinned
            self._changed()

    async def _keep_lease(self) -> None:
        """Without a leader, or without the raylet that it belongs to, an agent is a stray: nobody can reach it to end it."""
        raylet = os.getppid()
        while not self._closed:
            await asyncio.sleep(STRAY_LOOK_S)
            if time.monotonic() - self.led_at > LEASE_S or os.getppid() != raylet:
                try:
                    await self._close()
                finally:
                    os._exit(0)

    def _obey(self, term: int) -> None:
        if term < self.term:
            raise StaleLeader(f"term {term} is over, {self.term} leads")
        self.term = term
        self.led_at = time.monotonic()

    def _make_folders(self) -> None:
        """Again before each use: somebody may have cleaned /dev/shm or /tmp under a running job. Raises RuntimeError after the end."""
        if self._closed:
            raise RuntimeError("this agent has ended all that it had; nothing starts here any more")
        for folder in (self.shm, self.tmp):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _keep(self, state: Kept) -> None:
        """Calls may overtake each other: the newest state stays."""
        if self.kept is None or (state.term, state.sequence) > (self.kept.term, self.kept.sequence):
            self.kept = state

    def status(self) -> AgentStatus:
        stopped = self.surveyed >= self.ranks.generation and not self.ranks.living
        if self.ranks.living:
            self._look()
        return AgentStatus(
            index=self.index,
            incarnation=self.incarnation,
            version=self.version,
            ready=self.ranks.ready,
            problem=self.problem or self.ranks.problem,
            problem_kind=self._problem_kind,
            generation=self.ranks.generation,
            stopped=stopped,
            ranks=self.ranks.reports(),
            holdings=self.held if stopped else (),
            staged=dict(self.staging.answers),
            pinned=dict(self.pinned),
            metrics=self.ranks.metrics(),
            stuck=tuple(self.stuck),
            at=time.time(),
            silent=self.ranks.silent(),
            quiet=self.ranks.quiet(),
            missing_files=self._missing,
            stacks_of=self.stacks[0],
            stacks=self.stacks[1],
            notes=tuple(self.ranks.notes),
            copies=self.copies if stopped else (),
            unfetched=dict(self.exchange.unfetched),
            saving=self.shares.progress,
        )

    # orders of the coordinator; each answers with the status

    async def follow(self, term: int) -> tuple[AgentStatus, int, Kept | None]:
        """Accept a new leader: (status, the highest term seen before, the newest state that a leader left here)."""
        before = self.term
        self._obey(term if term > before else before)
        async with self._order:
            if self.surveyed < self.ranks.generation and not self.ranks.reports():
                await self._survey()  # this process has launched nothing yet
        return self.status(), before, self.kept

    async def poll(self, term: int, version: int) -> AgentStatus:
        """Answers at the next change after ``version``, or after a beat."""
        self._obey(term)
        if self.version <= version:
            self._change.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._change.wait(), BEAT_S)
        return self.status()

    async def keep(self, term: int, state: Kept) -> AgentStatus:
        self._obey(term)
        self._keep(state)
        return self.status()

    async def open_rendezvous(self, term: int, generation: int) -> tuple[str, int, bool]:
        """(address, port, whether a store is served there) for a generation whose rank 0 lives on this node."""
        self._obey(term)
        if self.spec.framework == "pytorch":
            return self.address, await self.ranks.open_store(generation, self.address), True
        return self.address, self.ranks.port.reserve(generation, self.address), False

    async def launch(self, term: int, order: LaunchOrder, state: Kept) -> AgentStatus:
        self._obey(term)
        self._keep(state)
        await self.exchange.end_fetch()
        async with self._order:
            if order.generation > max(self.ranks.generation, self.fenced) and self.ranks.ready:
                self._launch(order)
        return self.status()

    def _launch(self, order: LaunchOrder) -> None:
        if self.surveyed < self.ranks.generation or self.ranks.living:
            raise RuntimeError(f"generation {order.generation} cannot start: generation {self.ranks.generation} was not stopped")
        self._make_folders()
        in_slots = order.restore.source in (Source.MEMORY, Source.PEER)
        discard_newer(self.shm, self.ranks.numbers, order.restore.step if in_slots else 0)
        self.exchange.drop_newer(order.restore.step)
        self.exchange.unfetched.clear()
        self.held, self.copies = (), ()
        self.stacks, self._missing = (None, ()), None
        staged = staged_name(order.restore.url) if order.restore.url else None
        self.ranks.launch(order, staged)
        if self.index == 0 and self.spec.framework == "pytorch":  # the next generation's store listens before it is needed
            asyncio.get_running_loop().call_later(0.2, self._store_ahead, order.generation + 1)
        self._changed()

    def _store_ahead(self, generation: int) -> None:
        if self.ranks.generation == generation - 1 and self.ranks.launcher_lives:
            self._tasks.append(asyncio.create_task(self._quietly(self.ranks.open_store(generation, self.address))))

    async def _quietly(self, work: Any) -> None:
        with contextlib.suppress(Exception):
            await work

    async def stop(self, term: int, generation: int, state: Kept) -> AgentStatus:
        """End every rank up to ``generation`` and survey the snapshots they left."""
        self._obey(term)
        self._keep(state)
        async with self._order:
            self.fenced = max(self.fenced, generation)
            if self.ranks.generation <= generation and (self.surveyed < self.ranks.generation or self.ranks.living):
                self.stuck = await self.ranks.stop(generation)
                if not self.stuck:
                    await self._survey()
                self._changed()
        return self.status()

    async def _survey(self) -> None:
        """Verify the snapshots; pins of checkpoints that nobody writes any more are given back."""
        found = await asyncio.to_thread(holdings, self.shm, self.ranks.numbers, True)
        for holding in found:
            if holding.pinned and (self.shares.progress is None or holding.step != self.shares.progress.step):
                unpin(self.shm, self.ranks.numbers, holding.step)
        self.pinned = {}
        self.held = tuple(found)
        self.copies = peers.copies(self.shm, self.ranks.numbers)
        self.surveyed = self.ranks.generation

    async def terminate(self, term: int) -> AgentStatus:
        self._obey(term)
        self.ranks.terminate()
        return self.status()

    async def take_stacks(self, term: int, asked_at: float) -> AgentStatus:
        """Python stacks of all ranks that live here; the answer is in ``stacks``."""
        self._obey(term)
        if self._taking != asked_at:
            self._taking = asked_at
            taken: tuple[RankStacks, ...] = ()
            with contextlib.suppress(Exception):
                taken = await asyncio.wait_for(asyncio.to_thread(take, self.ranks.pids()), TAKE_S + 0.2)
            self.stacks = (asked_at, taken)
            self._changed()
        return self.status()

    async def stage(self, term: int, url: str) -> AgentStatus:
        """Read and verify a checkpoint into shared memory; the answer is in ``staged``. Asked again where storage did not give it."""
        self._obey(term)
        self._make_folders()
        if await self.staging.bring(url):
            self._changed()
        return self.status()

    async def unstage(self, term: int) -> AgentStatus:
        """The ranks have restored: free the memory of staged checkpoints."""
        self._obey(term)
        await self.staging.clear()
        self._changed()
        return self.status()

    async def fetch(self, term: int, step: int, fetches: Sequence[Fetch]) -> AgentStatus:
        """Make the snapshots of ``step`` whole from other nodes' memory; the answer is in ``holdings``, or in ``unfetched``."""
        self._obey(term)
        self._make_folders()
        await self.exchange.fetch(step, fetches)
        return self.status()

    async def _fetched(self, ranks: Sequence[int], step: int | None) -> None:
        """The snapshots of ``step`` were verified on the way; None: a fetch failed half-way, so all are looked at again."""
        found = await asyncio.to_thread(holdings, self.shm, ranks, step is None)
        new = {(h.rank, h.slot): h for h in found if step in (None, h.step)}
        kept = [h for h in self.held if (h.rank, h.slot) not in new and not (step is None and h.rank in ranks)]
        self.held = (*kept, *new.values())
        self._changed()

    async def copy_slots(self, term: int, step: int, generation: int, complete: int | None) -> str | None:
        """Copy this node's pinned snapshots; None when it is done, else why not."""
        self._obey(term)
        return await self.exchange.copy(step, generation, complete)

    async def guard_copies(self, term: int, step: int, generation: int, complete: int | None) -> str | None:
        """Hold what is their own of the ranks of the node before this one; None when it is done, else why not."""
        self._obey(term)
        return await self.exchange.guard(step, generation, complete)

    async def drop_copies(self, term: int, keep: int | None) -> None:
        self._obey(term)
        await asyncio.to_thread(self.exchange.drop, {keep})

    async def write_share(self, term: int, step: int, generation: int) -> dict[str, Any]:
        """Write this node's share of the checkpoint of ``step`` from its snapshots; keeps them until it is done."""
        self._obey(term)
        return asdict(await self.shares.write(step, generation))

    async def abandon_share(self, term: int, step: int) -> None:
        """Storage does not answer: whoever waits for the share of ``step`` is released, and the write ends when it can."""
        self._obey(term)
        self.shares.abandon(step)

    async def try_restore(self, term: int, url: str, step: int) -> RestoreTrial | None:
        """Read a checkpoint back in a child of the launcher, as ranks would; None where the child was ended before it could tell."""
        self._obey(term)
        return await self.ranks.try_restore(url, step)

    async def unpin(self, term: int, step: int) -> None:
        self._obey(term)
        unpin(self.shm, self.ranks.numbers, step)

    async def request_checkpoint(self, term: int, step: int) -> None:
        self._obey(term)
        self.ranks.request_checkpoint(step)

    async def drill(self, term: int, fault: str, rank: int) -> tuple[str, AgentStatus]:
        """Raises ValueError when the rank does not run."""
        self._obey(term)
        if fault == "agent":
            self.ranks.drilled = fault
            self._changed()
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGKILL)
            return f"agent of node {self.index}, process {os.getpid()}, ends itself by SIGKILL", self.status()
        return self.ranks.drill(fault, rank), self.status()

    # what other agents of the group ask for

    async def offer(self, rank: int, step: int, part: str) -> Offer | None:
        return await self.exchange.offer(rank, step, part)

    async def give(self, name: str, at: int, size: int) -> Any:
        return await self.exchange.give(name, at, size)

    # the end

    async def close(self, term: int) -> list[int]:
        """End everything on this node and leave nothing in its memory or /tmp; returns pids that would not go."""
        self._obey(term)
        return await self._close()

    async def leave(self) -> None:
        """End this process, after ``close``; the caller sees the actor die."""
        os._exit(0)

    async def _close(self) -> list[int]:
        self._closed = True
        await self.exchange.end_fetch()
        left = self.ranks.close()
        await asyncio.to_thread(remove_folders, f"{self.spec.key}.{self.index}")  # first: a stray may be ended at any moment
        await asyncio.to_thread(self.ranks.settle)
        return left
