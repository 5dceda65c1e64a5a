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


async def in_thread(function: Callable[..., T], *args: Any, limit_s: float | None = None) -> T:
    """``function(*args)`` without blocking the loop. Raises what it raises, TimeoutError after ``limit_s`` seconds."""
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
    return await asyncio.wait_for(future, limit_s)
