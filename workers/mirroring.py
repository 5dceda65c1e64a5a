"""Memory checkpoints of a group: the coordinator's side. Every node keeps a copy of its snapshots of a checkpoint's step, and the node
after it one of what is its ranks' own, so that a node whose shared memory is gone can go on from there, storage or not.

Invariants: one in flight; the one before is dropped when the next is complete on all nodes; nothing here holds up or ends training.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workers.group import Group
from workers.messages import GroupSpec


@dataclass
class Mirror:
    """``call`` sends an order to all agents and gives their answers by node; ``update`` changes the group and keeps it."""

    spec: GroupSpec
    call: Callable[..., Awaitable[Mapping[int, Any]]]
    group: Callable[[], Group]
    update: Callable[[Group], None]
    now: Callable[[], float]
    task: asyncio.Task[None] | None = None
    failing: bool = False  # told once, until it works again

    async def copy(self, step: int, generation: int) -> None:
        """Called while the snapshots of ``step`` are pinned, which they must be until this returns. The neighbours' part follows in the
        background; a checkpoint that comes before it is done has no copies."""
        if len(self.spec.nodes) < 2 or (self.task is not None and not self.task.done()):
            return
        if await self._all_do("copy_slots", step, generation):
            self.task = asyncio.create_task(self._guard(step, generation))

    async def _guard(self, step: int, generation: int) -> None:
        if await self._all_do("guard_copies", step, generation):
            self.failing = False
            self.update(replace(self.group(), mirrored=step))
            await self._drop()

    async def _all_do(self, order: str, step: int, generation: int) -> bool:
        try:
            answers = await self.call(order, step, generation, self.group().mirrored)
        except Exception:  # an agent is gone, which is told elsewhere
            return False
        problems = [f"node {index}: {problem}" for index, problem in answers.items() if problem]
        if self.group().generation != generation:
            return False
        if problems and not self.failing:
            self.failing = True
            self.update(self.group().say(self.now(), "MemoryCheckpointSkipped", f"step {step}: {problems[0]}"))
        if problems:
            await self._drop()
        return not problems

    async def _drop(self) -> None:
        with contextlib.suppress(Exception):
            await self.call("drop_copies", self.group().mirrored)
