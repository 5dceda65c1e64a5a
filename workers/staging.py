"""Checkpoints on their way from storage into the shared memory of a node.

Invariant: storage that hangs holds up nothing but the checkpoint that was asked for, and that for ``limit_s`` seconds only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from workers.checkpoint.background import in_thread
from workers.checkpoint.catalog import problem_of, stage, staged_name, unstage
from workers.messages import Problem, Unfit


class Staging:
    """``answers``: what keeps a checkpoint, by url, from being restored here; None: it is ready."""

    def __init__(self, shm: Path, ranks: Sequence[int], world_size: int, limit_s: float) -> None:
        self._shm, self._ranks, self._world_size, self._limit_s = shm, ranks, world_size, limit_s
        self._under_way: set[str] = set()
        self.answers: dict[str, Problem | None] = {}

    async def bring(self, url: str) -> bool:
        """Read and verify what the ranks need; again where storage did not give it before. False: that was not needed."""
        known = self.answers.get(url)
        if known is not None and known.why is Unfit.UNREADABLE:
            del self.answers[url]
        if url in self.answers or url in self._under_way:
            return False
        self._under_way.add(url)
        which = (url, self._shm, staged_name(url), self._ranks, self._world_size)
        try:
            self.answers[url] = await in_thread(stage, *which, limit_s=self._limit_s)
        except TimeoutError as error:
            self.answers[url] = problem_of(error)
        finally:
            self._under_way.discard(url)
        return True

    async def clear(self) -> None:
        """The ranks have restored: free the memory."""
        for url in list(self.answers):
            del self.answers[url]  # nobody is to count on it from here on
            await asyncio.to_thread(unstage, self._shm, staged_name(url))
