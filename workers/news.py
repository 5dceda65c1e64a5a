"""What the control plane shall hear of at once, without its next poll."""

from __future__ import annotations

import asyncio

from workers.group import Group


class News:
    """Counts what the control plane shall hear of at once, without its next poll: another phase, generation or incident."""

    def __init__(self) -> None:
        self.count = 0
        self._known: tuple[object, ...] = ()
        self._more = asyncio.Event()

    def look(self, group: Group) -> None:
        known = (group.shown[0], group.generation, len(group.incidents), sum(i.recovered_at is not None for i in group.incidents))
        if known != self._known:
            self._known = known
            self.count += 1
            self._more.set()
            self._more = asyncio.Event()

    async def after(self, seen: int) -> int:
        while self.count <= seen:
            await self._more.wait()
        return self.count
