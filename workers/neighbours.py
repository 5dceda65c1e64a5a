"""The other agents of a group as one agent reaches them: calls between actors, whose large answers go through Ray's object transfer."""

from __future__ import annotations

import asyncio
from typing import Any

from workers.checkpoint.tree import StateError
from workers.messages import Offer

ANSWER_S = 30.0  # for one piece, or for the verification of one part


def agent_name(key: str, index: int) -> str:
    return f"{key}.agent.{index}"


class Neighbour:
    """Raises ConnectionError while the agent cannot be reached, StateError for what it answers with an error."""

    def __init__(self, key: str, index: int) -> None:
        self._name = agent_name(key, index)
        self._handle: Any = None

    async def offer(self, rank: int, step: int, part: str) -> Offer | None:
        found: Offer | None = await self._ask("offer", rank, step, part)
        return found

    async def give(self, name: str, at: int, size: int) -> Any:
        return await self._ask("give", name, at, size)

    async def _ask(self, what: str, *args: Any) -> Any:
        import ray  # here, for it reads its settings once: a process may still have to make them
        from ray.exceptions import RayActorError, RayTaskError

        try:
            if self._handle is not None:
                try:
                    return await self._call(self._handle, what, *args)
                except RayActorError:  # it may have been replaced
                    self._handle = None
            self._handle = handle = await asyncio.to_thread(ray.get_actor, self._name)
            return await self._call(handle, what, *args)
        except RayTaskError as error:
            raise StateError(f"{self._name}: {error.cause}") from None
        except (RayActorError, ValueError, TimeoutError) as error:  # ValueError: there is no such actor now
            raise ConnectionError(f"{self._name} does not answer: {type(error).__name__}") from error

    async def _call(self, handle: Any, what: str, *args: Any) -> Any:
        return await asyncio.wait_for(getattr(handle, what).remote(*args), ANSWER_S)
