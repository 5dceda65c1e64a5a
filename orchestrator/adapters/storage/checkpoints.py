"""The Checkpoints port over storage. Invariant: at most READERS read at once, so that storage that hangs cannot take all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from orchestrator.ports import Archive, Unavailable
from workers.checkpoint import archive as archives
from workers.checkpoint import catalog
from workers.checkpoint.storage import open_folder, unusable
from workers.checkpoint.tree import StateError
from workers.messages import Unfit

READERS = 4
T = TypeVar("T")


class StoredCheckpoints:
    """Implements orchestrator.ports.Checkpoints."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(READERS)

    def unusable(self, url: str) -> str | None:
        return unusable(url)

    def verify(self, url: str) -> str | None:
        self._take()
        try:
            problem = catalog.verify(url)
        finally:
            self._free.release()
        if problem is not None and problem.why is not Unfit.DAMAGED:  # nothing was learnt of its bytes
            raise Unavailable(f"{url}: {problem}")
        return problem.text if problem is not None else None

    def pin(self, url: str) -> bool:
        return self._answer(lambda: catalog.pin(url))

    def unpin(self, url: str) -> None:
        self._answer(lambda: catalog.unpin(url))

    def archive(self, url: str) -> Archive:
        try:
            size, chunks = self._answer(lambda: archives.archive(url))
        except StateError as error:
            raise ValueError(str(error)) from error
        return Archive(size, self._counted(chunks))

    def remove_folder(self, url: str) -> None:
        def left() -> bool:
            folder = open_folder(url)
            folder.remove_all()
            return folder.exists()

        if self._answer(left):
            raise Unavailable(f"storage: {url} cannot be removed whole: something in it is in use or protected")

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        self._take()
        try:
            yield from chunks
        except StateError as error:
            raise OSError(str(error)) from error
        finally:
            self._free.release()

    def _take(self) -> None:
        if not self._free.acquire(blocking=False):
            raise Unavailable(f"storage: {READERS} checkpoints are being read, more wait for storage to answer")

    def _answer(self, ask: Callable[[], T]) -> T:
        self._take()
        try:
            return ask()
        except (OSError, ImportError) as error:  # of a driver that this server lacks
            raise Unavailable(f"storage: {error}") from error
        finally:
            self._free.release()
