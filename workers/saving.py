"""Checkpoints of a group: the coordinator's side of the two-phase commit, one in flight, and retention after it.

Invariants: a checkpoint is committed only when every node's share of the same step is written and the generation that made it still
leads; nothing is removed before a newer one has been read back and verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.checkpoint.catalog import catalog, discard, ever_committed, remove, sweep, verify
from workers.checkpoint.format import FileEntry, Share, Tree
from workers.checkpoint.retention import to_remove
from workers.checkpoint.writer import commit
from workers.group import Group, Seen
from workers.locating import newest_in_memory
from workers.messages import AgentStatus, CheckpointFound, GroupSpec
from workers.mirroring import Mirror

KEPT_RECORDS = 200
LEAD_S = 1.0  # a requested step lies this far ahead, so that every rank hears of it in time


def common_pin(statuses: Sequence[AgentStatus], world_size: int) -> tuple[int | None, set[int]]:
    """(step that every rank has pinned, steps that some rank pinned and others have passed by). PURE."""
    pins = {rank: step for s in statuses for rank, step in s.pinned.items()}
    if not pins:
        return None, set()
    newest = max(pins.values())
    ready = len(pins) == world_size and set(pins.values()) == {newest}
    passed = {rank.rank for s in statuses for rank in s.ranks if rank.rank not in pins and (rank.step or 0) > newest + 1}
    stale = {step for step in pins.values() if step < newest} | ({newest} if passed and not ready else set())
    return (newest if ready else None), stale


@dataclass
class Saver:
    """``call`` sends an order to all agents and gives their answers by node; ``update`` changes the group and keeps it."""

    spec: GroupSpec
    call: Callable[..., Awaitable[Mapping[int, Any]]]
    group: Callable[[], Group]
    update: Callable[[Group], None]
    mirror: Mirror
    task: asyncio.Task[None] | None = None
    asked_at: float | None = None

    @property
    def busy(self) -> bool:
        return self.task is not None and not self.task.done()

    def look(self, seen: Seen, now: float) -> None:
        """Called at each change while the group trains: starts the write of a pinned step, gives stale pins back, asks for the next one."""
        statuses = [a.status for a in seen.agents if a.status is not None]
        if self.busy or len(statuses) < len(self.spec.nodes):
            return
        step, stale = common_pin(statuses, self.spec.world_size)
        pinned = stale | ({step} if step is not None else set())
        committed = {s for s in pinned if s <= (self.group().checkpoint_step or 0)}
        if committed:  # a coordinator may have died between the commit and this
            self.task = asyncio.create_task(self._unpin(committed))
        elif step is not None:
            self.task = asyncio.create_task(self._save(step, self.group().generation))
        elif stale:
            self.task = asyncio.create_task(self._give_back(stale))
        else:
            self._ask(statuses, now)

    def _ask(self, statuses: Sequence[AgentStatus], now: float) -> None:
        """By time: name a step far enough ahead that no rank has passed it when it hears of it."""
        every = self.spec.every_seconds
        ranks = [r for s in statuses for r in s.ranks]
        steps = [r.step for r in ranks if r.step]
        if every is None or not steps or len(steps) < self.spec.world_size:
            return
        group = self.group()
        last = group.checkpoints[-1].committed_at if group.checkpoints else group.started_at
        if last is None or now - max(last, self.asked_at or 0.0) < every:
            return
        seconds = max(1e-3, max(r.step_seconds or 1.0 for r in ranks))
        self.asked_at = now
        self.task = asyncio.create_task(self._request(max(steps) + max(2, math.ceil(LEAD_S / seconds))))

    async def _request(self, step: int) -> None:
        await self.call("request_checkpoint", step)

    async def _give_back(self, steps: set[int]) -> None:
        await self._unpin(steps)
        group = self.group().say(
            time.time(), "CheckpointSkipped", f"step {min(steps)}: storage is slower than the interval, or a rank passed by"
        )
        self.update(group)

    async def _unpin(self, steps: set[int]) -> None:
        for step in steps:
            with contextlib.suppress(Exception):
                await self.call("unpin", step)

    async def _save(self, step: int, generation: int) -> None:
        copied = asyncio.create_task(self.mirror.copy(step, generation))
        url = await self.save(step, generation)
        await copied
        await self._unpin({step})
        if url is not None:
            await self._retain(url)

    async def save(self, step: int, generation: int) -> str | None:
        """Two phases: every agent writes its share, then the manifest. A failure is an event, never the end of training.

        Returns the url of the checkpoint; None when it failed, and then nothing of it is left.
        """
        started = time.time()
        try:
            answers = await self.call("write_share", step, generation)
            shares = [_share(answer) for answer in answers.values()]
            if self.group().generation != generation:
                raise RuntimeError(f"generation {generation} ended before the commit")
            spec = self.spec
            record = await asyncio.to_thread(
                commit, spec.storage_url, spec.job_id, spec.attempt, generation, step, spec.world_size, shares, started, time.time()
            )
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            self.update(self.group().say(time.time(), "CheckpointFailed", f"step {step}: {cause}"))
            with contextlib.suppress(Exception):
                await asyncio.to_thread(discard, self.spec.storage_url, step, self.spec.attempt, generation)
            return None
        group = self.group()
        group = replace(group, checkpoints=(*group.checkpoints, record)[-KEPT_RECORDS:])
        size = f"{record.bytes / 2**20:.1f} MiB in {record.write_seconds:.2f} s"
        self.update(group.say(time.time(), "CheckpointCommitted", f"step {step}: {size}"))
        return record.url

    async def _retain(self, newest: str) -> None:
        """Read the newest back; only then may older ones go."""
        try:
            problem = await asyncio.to_thread(verify, newest)
            if problem is not None:
                self.update(self.group().say(time.time(), "CheckpointInvalid", f"{newest} does not read back: {problem}"))
                return
            found = await asyncio.to_thread(catalog, self.spec.storage_url)
            complete = [c.url for c in found if c.problem is None]
            restoring = self.group().restore
            in_use = {restoring.url} if restoring is not None and restoring.url else set()
            gone = to_remove(complete, self.spec.keep_last, {newest}, in_use)
            for url in gone:
                await asyncio.to_thread(remove, url)
        except Exception as error:
            self.update(self.group().say(time.time(), "RetentionFailed", str(error)))
            return
        if gone:
            group = self.group()
            self.update(replace(group, pruned=(*group.pruned, *gone)[-KEPT_RECORDS:]))

    async def save_final(self, seen: Seen) -> None:
        """The newest state that all ranks left, unless it is committed already."""
        if self.task is not None:
            with contextlib.suppress(Exception):
                await self.task
        group = self.group()
        step = newest_in_memory(group, seen)
        if step is not None and step > (group.checkpoint_step or 0):
            url = await self.save(step, group.generation)
            if url is not None:
                await self._retain(url)


def read_catalog(spec: GroupSpec) -> tuple[CheckpointFound, ...]:
    """Checkpoints in the job's folder, newest first.

    A folder without a manifest is a write that never ended; those of earlier attempts are removed. It counts as damaged only where some
    checkpoint was once whole and none is now: then it may be all that is left, and nothing is removed or started from zero.
    """
    found = catalog(spec.storage_url)
    whole = any(c.problem is None for c in found)
    if whole or not ever_committed(spec.storage_url):
        sweep(spec.storage_url, spec.attempt + 1)
        found = [c for c in found if c.manifest]
    return tuple(CheckpointFound(c.url, c.step, c.problem) for c in found)


def _share(answer: Mapping[str, Any]) -> Share:
    fields = dict(answer)
    fields["files"] = [FileEntry(**f) for f in answer["files"]]
    fields["shared"] = Tree(**answer["shared"])
    fields["own"] = {rank: Tree(**tree) for rank, tree in answer["own"].items()}
    return Share(**fields)
