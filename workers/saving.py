"""Checkpoints of a group: the coordinator's side of the two-phase commit, one in flight, and retention after it.

Invariants: a checkpoint is committed only when every node's share of the same step is written and the generation that made it still
leads; nothing is removed before a newer one has been read back and verified; storage that hangs holds up neither the training nor the
next checkpoint nor the end of the job for longer than its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workers.checkpoint.background import Calls
from workers.checkpoint.catalog import catalog, discard, remove, verify
from workers.checkpoint.damage import change_a_byte
from workers.checkpoint.format import FileEntry, Share, Tree
from workers.checkpoint.lease import Lease, claim
from workers.checkpoint.retention import to_remove
from workers.checkpoint.tree import StateError
from workers.checkpoint.writer import GivenUp, commit
from workers.group import KEPT_RECORDS, Doing, Group, Seen
from workers.locating import newest_in_memory
from workers.messages import AgentStatus, CheckpointRecord, GroupSpec, SaveProgress, Unfit
from workers.mirroring import Mirror
from workers.pacing import common_pin, pause, step_to_ask

COMMITS_IN = frozenset({Doing.TRAINING, Doing.FINISHING, Doing.ENDING})  # a generation that failed commits nothing any more
LOOK_S = 0.5  # between two looks at a write
STALL_S = 60.0  # storage that takes no byte for this long hangs
SLOWEST = 10e6  # bytes per second at which reading back is still waited for
TRIAL_S = 330.0  # the kernel ends the child before
ABANDON_S, DISCARD_S = 5.0, 10.0


class _Commit:
    """A commit, and what may still come of it once it was given up."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        self._leads = leads
        self.given_up = False
        self.record: CheckpointRecord | None = None

    def run(self, *whole: Any) -> CheckpointRecord:
        self.record = commit(*whole, wanted=lambda: self._leads() and not self.given_up)
        return self.record


@dataclass
class Saver:
    """``call`` sends an order to all agents and gives their answers by node; ``update`` changes the group and keeps it."""

    spec: GroupSpec
    call: Callable[..., Awaitable[Mapping[int, Any]]]
    group: Callable[[], Group]
    update: Callable[[Group], None]
    seen: Callable[[], Seen]
    mirror: Mirror
    now: Callable[[], float]
    task: asyncio.Task[None] | None = None
    asked: tuple[int, int] = (-1, 0)  # (generation, step) that the ranks were asked for last
    tried: tuple[int, int] = (-1, 0)  # (generation, step) of the newest save, whatever came of it
    failures: int = 0  # saves in a row that storage did not take
    retry_at: float = 0.0  # none is begun before
    restores: bool | None = None  # what the newest restore test has shown; None: nothing yet
    calls: Calls = field(default_factory=Calls)  # to storage
    _tidying: asyncio.Task[None] | None = None
    _checking: asyncio.Task[None] | None = None  # of a drill

    @property
    def busy(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def progress(self) -> SaveProgress | None:
        """Of the checkpoint that is being written, all nodes together."""
        parts = [a.status.saving for a in self.seen().agents if a.status is not None and a.status.saving is not None]
        if not parts:
            return None
        step = max(p.step for p in parts)
        return SaveProgress(step, sum(p.bytes for p in parts if p.step == step), sum(p.total_bytes for p in parts if p.step == step))

    def look(self, seen: Seen, now: float) -> None:
        """Called at each change while the group trains: starts the write of a pinned step, gives stale pins back, asks for the next one."""
        statuses = [a.status for a in seen.agents if a.status is not None]
        if self.busy or len(statuses) < len(self.spec.nodes):
            return
        step, stale = common_pin(statuses, self.spec.world_size)
        pinned = stale | ({step} if step is not None else set())
        committed = {s for s in pinned if s <= (self.group().checkpoint_step or 0)}
        waits = now < self.retry_at or self.calls.hang
        given_back = step is not None and (self.group().generation, step) == self.tried  # that status may not know it yet
        if step is not None and (waits or given_back):
            committed.add(step)
        if committed:  # a coordinator may have died between the commit and this
            self.task = asyncio.create_task(self._unpin(committed))
        elif step is not None:
            self.task = asyncio.create_task(self._save(step, self.group().generation))
        elif stale:
            self.task = asyncio.create_task(self._give_back(stale))
        elif not waits:
            self._ask(statuses, now)

    def _ask(self, statuses: Sequence[AgentStatus], now: float) -> None:
        step = step_to_ask(self.group(), [r for s in statuses for r in s.ranks], self.asked, now)
        if step is not None:
            self.asked = (self.group().generation, step)
            self.task = asyncio.create_task(self._request(step))

    async def _request(self, step: int) -> None:
        await self.call("request_checkpoint", step)

    async def _give_back(self, steps: set[int]) -> None:
        await self._unpin(steps)
        group = self.group().say(
            self.now(), "CheckpointLeftOut", f"step {min(steps)}: storage is slower than the interval, or a rank passed by"
        )
        self.update(group)

    async def _unpin(self, steps: set[int]) -> None:
        for step in steps:
            with contextlib.suppress(Exception):
                await self.call("unpin", step)

    async def _save(self, step: int, generation: int) -> None:
        self.tried = (generation, step)
        copied = asyncio.create_task(self.mirror.copy(step, generation))
        record, _ = await self.save(step, generation)
        if record is not None and not self.restores:
            await self._test_restore(record)  # while the snapshot that it is compared with is still pinned
        await copied
        await self._unpin({step})
        if record is not None:
            await self._retain(record)

    def _leads(self, generation: int) -> bool:
        """What a generation has left may be committed while it has not failed."""
        group = self.group()
        return group.generation == generation and group.doing in COMMITS_IN

    async def save(self, step: int, generation: int) -> tuple[CheckpointRecord | None, str]:
        """Two phases: every agent writes its share, then the manifest. A failure is an event, never the end of training.

        Returns the checkpoint, or None and what went wrong; then nothing of it is left, as soon as storage lets go of it.
        """
        started, spec, committing = self.now(), self.spec, _Commit(lambda: self._leads(generation))
        try:
            await self.calls.make(claim, spec.storage_url, Lease(spec.job_id, spec.attempt, generation), limit_s=STALL_S)
            shares = await self._shares(step, generation)
            whole = (spec.storage_url, spec.job_id, spec.attempt, generation, step, spec.world_size, shares, started, self.now())
            record = await self.calls.make(committing.run, *whole, limit_s=STALL_S)
        except Exception as error:
            committing.given_up = True
            told = self._failed(step, getattr(error, "cause", None) or error)
            self._tidying = asyncio.create_task(self._tidy(step, generation, committing))
            await asyncio.wait({self._tidying}, timeout=DISCARD_S)
            return None, told
        self._committed(record)
        return record, ""

    def _committed(self, record: CheckpointRecord) -> None:
        self.failures, self.retry_at = 0, 0.0
        group = replace(self.group(), checkpoints=(*self.group().checkpoints, record)[-KEPT_RECORDS:])
        size = f"{record.bytes / 2**20:.1f} MiB in {record.write_seconds:.2f} s"
        self.update(group.say(self.now(), "CheckpointCommitted", f"step {record.step}: {size}"))

    def _failed(self, step: int, error: BaseException) -> str:
        """Tell it; storage is left alone for a while, and longer each time."""
        now, stalled = self.now(), isinstance(error, TimeoutError)
        told = (str(error) or self._hung()) if stalled else failure_text(error, self.spec.storage_url)
        if not isinstance(error, GivenUp):
            self.failures += 1
            self.retry_at = now + pause(self.failures)
        self.update(self.group().say(now, "CheckpointStalled" if stalled else "CheckpointFailed", f"step {step}: {told}"))
        return told

    async def _tidy(self, step: int, generation: int, given_up: _Commit) -> None:
        """Nothing of a failed write is left, but only once no thread is at it any more. One that was committed by then stays, unless its
        generation has failed: the next one may have gone back behind it."""
        await self.calls.settled()
        record = given_up.record
        with contextlib.suppress(Exception):
            if record is None:
                await self.calls.make(discard, self.spec.storage_url, step, self.spec.attempt, generation, limit_s=STALL_S)
            elif self._leads(generation) or self.group().outcome is not None:
                self._committed(record)
            else:
                await self.calls.make(remove, record.url, limit_s=STALL_S)

    async def _shares(self, step: int, generation: int) -> list[Share]:
        """What all nodes wrote. Raises TimeoutError when no byte was written anywhere for STALL_S; the agents are told to give up then."""
        work = asyncio.ensure_future(self.call("write_share", step, generation))
        last, moved_at = None, time.monotonic()
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK_S)
            progress = self.progress
            if not self._leads(generation):
                await self._abandon(step, work)
                raise GivenUp(f"generation {generation} ended before the commit")
            if progress != last:
                last, moved_at = progress, time.monotonic()
            elif not work.done() and time.monotonic() - moved_at > STALL_S:
                await self._abandon(step, work)
                there = f", {last.bytes} of {last.total_bytes} bytes are there" if last is not None else ""
                raise TimeoutError(self._hung() + there)
        return [_share(answer) for answer in work.result().values()]

    async def _abandon(self, step: int, work: asyncio.Future[Any]) -> None:
        work.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.call("abandon_share", step), ABANDON_S)

    def _hung(self) -> str:
        return (
            f"{self.spec.storage_url} has taken no byte for {STALL_S:.0f} s; the write is given up and the checkpoint before stays; "
            "look at that storage, another is tried when it answers"
        )

    async def _test_restore(self, record: CheckpointRecord) -> None:
        """Read the first checkpoint back as a restart would, so that one that cannot work is known in the first minute; after a failed test
        the next one too."""
        try:
            answers = await asyncio.wait_for(self.call("try_restore", record.url, record.step), TRIAL_S)
        except Exception as error:
            self.update(self.group().say(self.now(), "RestoreNotTested", f"step {record.step}: {error or 'no answer'}"))
            return
        trials = {index: trial for index, trial in answers.items() if trial is not None}
        if len(trials) < len(answers):
            return  # the ranks were restarted meanwhile; the next checkpoint is tested
        seconds = max(trial.seconds for trial in trials.values())
        problems = [f"node {index}: {trial.problem}" for index, trial in trials.items() if trial.problem]
        skipped = [f"node {index}: {trial.skipped}" for index, trial in trials.items() if trial.skipped]
        self.restores, now = not problems, self.now()
        if problems:
            told = f"step {record.step}: a restart from it would fail, {'; '.join(problems)}"
            group = self.group().say(now, "RestoreTestFailed", told)
            damaged = next((str(trial.problem) for trial in trials.values() if trial.damaged), None)
            self.update(group.checked(now, record.url, damaged) if damaged is not None else group)
        elif skipped:
            self.update(self.group().say(now, "RestoreNotTested", f"step {record.step}: {'; '.join(skipped)}"))
        else:
            same = "bit for bit the snapshot" if all(t.compared for t in trials.values()) else "by its checksums, the snapshot was gone"
            self.update(self.group().say(now, "RestoreTested", f"step {record.step}: read back in {seconds:.2f} s, {same}"))

    async def _retain(self, newest: CheckpointRecord) -> None:
        """Read the newest back; only then may older ones go, and none while the newest is known not to restore."""
        if self.restores is False:
            return
        limit = STALL_S + newest.bytes / SLOWEST
        try:
            if not await self.check(newest.url, limit):
                return
            found = await self.calls.make(catalog, self.spec.storage_url, limit_s=STALL_S)
            group = self.group()
            damaged = group.damaged | {c.url for c in found if c.problem is not None and c.problem.why is Unfit.DAMAGED}
            restoring = None if group.training else group.restore  # ranks that train have read it
            in_use = {restoring.url} if restoring is not None and restoring.url else set()
            finite = next((c.url for c in found if c.problem is None and c.finite), None)  # what a roll-back would need
            in_use |= {finite} if finite is not None else set()
            listed = [c.url for c in found if c.manifest]
            going = to_remove(listed, self.spec.keep_last, {newest.url}, in_use, damaged)
            gone = [url for url in going if await self.calls.make(remove, url, limit_s=STALL_S)]
        except Exception as error:
            told = f"{self.spec.storage_url} did not answer within {limit:.0f} s" if isinstance(error, TimeoutError) else str(error)
            self.update(self.group().say(self.now(), "RetentionFailed", f"nothing more was removed: {told}"))
            return
        if gone:
            group = self.group()
            self.update(replace(group, pruned=(*group.pruned, *gone)[-KEPT_RECORDS:]))

    async def check(self, url: str, limit_s: float, why: str = "") -> bool:
        """Read every byte of a checkpoint and keep what was found. Raises TimeoutError, or OSError where it could not be read."""
        begun = time.monotonic()
        problem = await self.calls.make(verify, url, limit_s=limit_s)
        if problem is not None and problem.why is not Unfit.DAMAGED:
            raise OSError(f"{url}: {problem}")
        now = self.now()
        group = self.group().checked(now, url, str(problem) if problem is not None else None)
        if problem is not None:
            told = f"{url} does not read back: {problem}{why} (found in {time.monotonic() - begun:.3f} s)"
            group = group.say(now, "CheckpointInvalid", told)
        self.update(group)
        return problem is None

    async def corrupt_newest(self) -> str:
        """The drill: really damage the newest checkpoint that is not known to be damaged, then read it back. Raises ValueError where there
        is none."""
        if self._checking is not None:
            await asyncio.wait({self._checking})  # what the drill before has damaged is known then
        found = await self.calls.make(catalog, self.spec.storage_url, limit_s=STALL_S)
        newest = next((c for c in found if c.problem is None and c.url not in self.group().damaged), None)
        if newest is None:
            raise ValueError("there is no whole checkpoint to damage")
        done = await self.calls.make(change_a_byte, newest.url, limit_s=STALL_S)
        self._checking = asyncio.create_task(self._check_drill(newest.url))
        return f"step {newest.step}: {done}; the event CheckpointInvalid tells when it is found, a restart takes the checkpoint before"

    async def _check_drill(self, url: str) -> None:
        try:
            whole = await self.check(url, STALL_S, why="; a drill damaged it")
        except Exception as error:  # storage that does not answer
            self.update(self.group().say(self.now(), "DrillNotChecked", f"{url}: {failure_text(error, url)}"))
            return
        if whole:
            self.update(self.group().say(self.now(), "DrillNotFound", f"{url} reads back whole although a drill damaged it"))

    async def save_final(self, seen: Seen) -> str | None:
        """The newest state that all ranks left, unless it is committed already. Returns why it is not in storage now, None: it is."""
        if self.task is not None:
            with contextlib.suppress(Exception):
                await self.task
        group = self.group()
        step = newest_in_memory(group, seen)
        if step is None or step <= (group.checkpoint_step or 0):
            return None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.calls.settled(), STALL_S)
        if self.calls.hang:
            return f"step {step}: {self._hung()}"
        record, problem = await self.save(step, group.generation)
        if record is None:
            return f"step {step}: {problem}"
        await self._retain(record)
        return None


def failure_text(error: BaseException, storage_url: str) -> str:
    """What to tell of a write that failed: the path, the cause and the remedy."""
    if isinstance(error, StateError | RuntimeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        path = error.filename or storage_url
        return f"{path} cannot be written: {error.strerror}; make it writable for this user, the checkpoint before stays"
    return f"{storage_url}: {type(error).__name__}: {error}"


def _share(answer: Mapping[str, Any]) -> Share:
    fields = dict(answer)
    fields["files"] = [FileEntry(**f) for f in answer["files"]]
    fields["shared"] = Tree(**answer["shared"])
    fields["own"] = {rank: Tree(**tree) for rank, tree in answer["own"].items()}
    return Share(**fields)
