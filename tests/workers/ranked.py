"""The ranks of one node under their real launcher, without Ray: started from a script, watched as an agent does it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.workers.make import spec
from workers.interfaces import LOOPBACK
from workers.messages import LaunchOrder, RankReport, RestoreOrder, Source
from workers.processes import TMP, sweep
from workers.ranks import Ranks

Seen = TypeVar("Seen")


class Ranked:
    """``work`` is the ranks' working directory."""

    def __init__(self, home: Path, script: str, ranks: int, **changes: Any) -> None:
        self.shm, self.work = home / "shm", home / "work"
        for folder in (self.shm, self.work):
            folder.mkdir(exist_ok=True)
        (self.work / "case.py").write_text(script)
        fields = {"framework": "plain", "strategy": None, "command": ("python", "case.py"), "job_id": f"job-{uuid.uuid4().hex[:12]}"}
        made = spec(nodes=1, processes_per_node=ranks, storage_url=str(home / "storage"), **fields | changes)
        tmp = TMP / f"{made.key}.0"
        tmp.mkdir(parents=True)
        self.ranks = Ranks(made, 0, self.shm, tmp, home / "logs", lambda: None, LOOPBACK)
        self.logs = home / "logs"

    async def until(self, look: Callable[[], Seen]) -> Seen:
        """The first true answer; boards and processes are read as the agent reads them."""
        async with asyncio.timeout(40):
            while True:
                with contextlib.suppress(OSError, ValueError):
                    self.ranks.read_boards()
                if found := look():
                    return found
                await asyncio.sleep(0.02)

    async def all_ended(self) -> tuple[RankReport, ...]:
        return await self.until(lambda: () if self.ranks.living else self.ranks.reports())

    def cgroup(self, rank: int) -> Path | None:
        """Whose counters are watched for a rank."""
        watch = self.ranks._ranks[rank].signs.memory
        return watch.folder if watch is not None else None

    def log(self, rank: int) -> str:
        return (self.logs / f"logs/a1/g0/rank-{rank}.log").read_text()


@contextlib.asynccontextmanager
async def ranked(home: Path, script: str, ranks: int = 1, **changes: Any) -> AsyncIterator[Ranked]:
    """The ranks of generation 0 have been launched; at the end nothing of them is left."""
    one = Ranked(home, script, ranks, **changes)
    try:
        one.ranks.start_launcher(one.work)
        await one.until(lambda: one.ranks.ready)
        one.ranks.launch(LaunchOrder(0, RestoreOrder(Source.NONE, 0), 1, "127.0.0.1", 1, False), None)
        await one.until(lambda: all(report.pid is not None for report in one.ranks.reports()) and len(one.ranks.reports()) == ranks)
        yield one
    finally:
        one.ranks.close()
        sweep(one.ranks.spec.key)
