"""Calls that storage may never answer, each in a daemon thread of its own.

Invariant: a call that hangs holds up nothing: not the event loop, not the end of the process, not the threads of other calls. What it does
when it goes on later is for the call itself to make harmless.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def start(function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Its outcome, in a thread of its own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = function(*args)
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:  # the loop has ended: nobody waits any more
            return

    threading.Thread(target=run, name=f"keepstep-{function.__name__}", daemon=True).start()
    return future


async def in_thread(function: Callable[..., T], *args: Any, limit_s: float | None = None) -> T:
    """``function(*args)`` without blocking the loop. Raises what it raises, TimeoutError after ``limit_s`` seconds."""
    return await asyncio.wait_for(start(function, *args), limit_s)


class Calls:
    """The calls of one user, who wants to know which of those that were given up still go on."""

    def __init__(self) -> None:
        self._hung: set[asyncio.Future[Any]] = set()

    @property
    def hang(self) -> bool:
        """Some call was given up and has not come back."""
        return any(not call.done() for call in self._hung)

    async def make(self, function: Callable[..., T], *args: Any, limit_s: float) -> T:
        """As ``in_thread``."""
        call = start(function, *args)
        try:
            return await asyncio.wait_for(asyncio.shield(call), limit_s)
        except (TimeoutError, asyncio.CancelledError):
            self._hung.add(call)
            call.add_done_callback(self._came_back)
            raise

    async def settled(self) -> None:
        """Returns when no call hangs."""
        while self.hang:
            await asyncio.wait(self._hung)

    def _came_back(self, call: asyncio.Future[Any]) -> None:
        self._hung.discard(call)
        if not call.cancelled():
            call.exception()  # nobody else asks
