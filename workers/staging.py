"""Bringing a checkpoint from storage into a node's shared memory, for its ranks to restore from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from workers.checkpoint.catalog import stage
from workers.messages import UNREADABLE

TRIES = 3


def staged_name(url: str) -> str:
    """Name of its folder in shared memory."""
    return "staged-" + url.rstrip("/").rsplit("/", 1)[-1]


async def bring(url: str, shm: Path, ranks: Sequence[int], world_size: int) -> str | None:
    """None when it is there and verified, else the problem. A storage that does not answer for a moment is no damaged checkpoint: it is
    asked again."""
    for again in range(TRIES):
        problem = await asyncio.to_thread(stage, url, shm, staged_name(url), ranks, world_size)
        if problem is None or not problem.startswith(UNREADABLE):
            return problem
        await asyncio.sleep(2.0 * (again + 1))
    return problem
