"""The agent's part of a checkpoint: its node's share is written from pinned snapshots, by a thread, while training goes on.

Invariants: one write at a time has somebody who waits for it; a write that was given up ends at its next piece, or stays in the hands of a
storage that does not answer, and of those there are at most MAX_STUCK.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from workers.checkpoint.background import in_thread
from workers.checkpoint.format import Share
from workers.checkpoint.tree import StateError
from workers.checkpoint.writer import write_share
from workers.messages import GroupSpec, SaveProgress

MAX_STUCK = 2  # given up, but still in the hands of a storage that does not answer


class ShareWrite:
    """The write of a share while it lasts. ``abandon`` ends it at its next piece, and for its caller at once."""

    def __init__(self, step: int) -> None:
        self.progress = SaveProgress(step, 0, 0)
        self.abandoned = asyncio.Event()
        self.done = False

    def wrote(self, count: int, total: int) -> None:
        """Called by the writing thread."""
        if self.abandoned.is_set():
            raise StateError("its coordinator gave the write up")
        self.progress = SaveProgress(self.progress.step, count, total)


class ShareWriter:
    """Writes the shares of one node. ``numbers``: its ranks."""

    def __init__(self, spec: GroupSpec, index: int, shm: Path, numbers: Sequence[int]) -> None:
        self._spec, self._index, self._shm, self._numbers = spec, index, shm, numbers
        self._writing: ShareWrite | None = None
        self.stuck: list[ShareWrite] = []  # given up, but not done

    @property
    def progress(self) -> SaveProgress | None:
        """Of the write that lasts; None where there is none."""
        return self._writing.progress if self._writing else None

    async def write(self, step: int, generation: int) -> Share:
        """Returns when the share is written. Raises StateError when it was given up, or what the write raises."""
        self.stuck = [w for w in self.stuck if not w.done]
        if len(self.stuck) >= MAX_STUCK:
            raise StateError(f"{len(self.stuck)} earlier writes still hang in {self._spec.storage_url}, which must answer first")
        writing = self._writing = ShareWrite(step)
        work = asyncio.create_task(self._write(writing, generation))
        gone = asyncio.create_task(writing.abandoned.wait())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.stuck.append(writing)
                work.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else hears of it
                raise StateError("the write was given up")
            return work.result()
        finally:
            gone.cancel()
            if self._writing is writing:
                self._writing = None

    def abandon(self, step: int) -> None:
        if self._writing is not None and self._writing.progress.step == step:
            self._writing.abandoned.set()

    async def _write(self, writing: ShareWrite, generation: int) -> Share:
        spec = self._spec
        which = (spec.storage_url, writing.progress.step, spec.attempt, generation)
        place = (self._index, len(spec.nodes), self._numbers)
        try:
            return await in_thread(write_share, self._shm, *which, *place, writing.wrote)
        finally:
            writing.done = True
