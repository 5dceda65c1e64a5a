"""Real agents with their launchers and ranks in this process, and a saver over them: all of a group but Ray and the coordinator's loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.workers.make import NOTHING, spec
from workers.agent import Agent
from workers.group import AgentSeen, Doing, Group, Kept, Seen, new_group
from workers.messages import GroupSpec, LaunchOrder, RestoreOrder
from workers.mirroring import Mirror
from workers.saving import Saver

SCRIPT = """
import time
import numpy as np
import workers
run = workers.start()
state = run.restore(state={"w": np.zeros(50_000), "rank": run.rank}).state
while True:
    state = {"w": state["w"] + 1, "rank": run.rank}
    run.step(state=state)
    time.sleep(0.005)
"""


def led_spec(storage: Path, nodes: int = 1, **changes: Any) -> GroupSpec:
    fields: dict[str, Any] = {
        "job_id": f"job-test-{time.monotonic_ns()}",
        "framework": "plain",
        "strategy": None,
        "command": ("python", "train.py"),
        "storage_url": str(storage),
        "snapshot_every_steps": 1,
    }
    return spec(nodes=nodes, **fields | changes)


class Led:
    """``call`` is what the coordinator's is; ``orders`` names what was called."""

    def __init__(self, given: GroupSpec) -> None:
        self.spec = given
        self.agents = [Agent(given, node.index, "127.0.0.1") for node in given.nodes]
        self.group: Group = replace(new_group(given, time.time()), doing=Doing.TRAINING, training=True, started_at=time.time())
        mirror = Mirror(given, self.call, lambda: self.group, self._update, time.time)
        self.saver = Saver(given, self.call, lambda: self.group, self._update, self.seen, mirror, time.time)
        self.generation = -1

    def _update(self, group: Group) -> None:
        self.group = group

    async def call(self, order: str, *args: Any) -> dict[int, Any]:
        """As over Ray, an agent goes on with an order whose answer nobody awaits any more."""
        if order == "guard_copies":
            raise ConnectionError("agents find each other through Ray, which is not here")
        orders = [asyncio.ensure_future(getattr(agent, order)(1, *args)) for agent in self.agents]
        answers = await asyncio.gather(*map(asyncio.shield, orders), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(enumerate(answers))

    def seen(self) -> Seen:
        return Seen(tuple(AgentSeen(a.index, a.status()) for a in self.agents))

    def look(self) -> None:
        self.saver.look(self.seen(), time.time())

    async def until(self, holds: Callable[[], Any], within: float = 20.0, look: bool = True) -> None:
        """``look``: the saver looks meanwhile, as it does while a group trains."""
        deadline = time.monotonic() + within
        while not holds():
            assert time.monotonic() < deadline, f"{self.told()} {[a.status() for a in self.agents]}"
            if look:
                self.look()
            await asyncio.sleep(0.01)

    def told(self) -> list[tuple[str, str]]:
        return [(e.reason, e.message) for e in self.group.events]

    def heard(self, reason: str) -> list[str]:
        return [message for told, message in self.told() if told == reason]

    async def launch(self, restore: RestoreOrder = NOTHING) -> None:
        await self.until(lambda: all(a.ranks.ready for a in self.agents))
        await self.stop()
        self.generation += 1
        self.group = replace(self.group, generation=self.generation)
        order = LaunchOrder(self.generation, restore, restore.step + 1, "127.0.0.1", 1, False)
        for agent in self.agents:
            await agent.launch(1, order, Kept(1, self.generation, self.group))

    async def stop(self) -> None:
        for agent in self.agents:
            await agent.stop(1, self.generation, Kept(1, self.generation, self.group))

    def steps(self) -> int:
        found = [r.step or 0 for a in self.agents for r in a.ranks.reports()]
        return min(found, default=0)


@contextlib.asynccontextmanager
async def led(given: GroupSpec, script: str = SCRIPT) -> AsyncIterator[Led]:
    work = Path(given.storage_url) / "work"
    work.mkdir(parents=True, exist_ok=True)
    (work / "train.py").write_text(script)
    group = Led(given)
    try:
        yield group
    finally:
        for agent in group.agents:
            for task in agent._tasks:
                task.cancel()
            await agent.close(1)
