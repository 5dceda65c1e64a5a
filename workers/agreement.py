"""What the ranks of a group agree on without a collective: the snapshot interval, and the step at which to stop.

Rank 0 decides and posts; the others look at the group's store at steps that all know. It relies on synchronous training: when a rank has
finished step s + 2, rank 0 has finished step s. A rank that does not find a post keeps what it has and looks again, so a late post costs
a few snapshots that match, never a wrong state. Invariant: nothing here waits for another rank.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

LAG = 2  # steps between a decision and its effect
SIGNAL_SPREAD = 1.0  # seconds within which all ranks of a group have got the same signal


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Alone:
    """The store of a group of one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class Agreement:
    """One rank's view. ``store`` None: the ranks have no store in common, so each decides for itself."""

    def __init__(self, store: Store | None, rank: int, world_size: int) -> None:
        self._store: Store = store if store is not None and world_size > 1 else Alone()
        self._leads = rank == 0 or store is None
        self._alone = world_size == 1 or store is None
        self.common = world_size == 1 or store is not None  # what one rank decides, all take
        self.stop_at: int | None = None

    def post_interval(self, step: int, every: int) -> None:
        """The decision made at ``step``, for use from ``step + LAG``."""
        if self._leads:
            self._store.set(f"keepstep/every/{step}", str(every))

    def interval(self, decided_at: int) -> int | None:
        return self._find(f"keepstep/every/{decided_at}")

    def seek_stop(self, step: int, step_seconds: float) -> None:
        """Called after each step once this rank was told to stop: sets ``stop_at`` to the step after which all ranks leave their loop."""
        if self.stop_at is None:
            if self._leads:
                margin = 0 if self._alone else max(LAG, math.ceil(SIGNAL_SPREAD / max(step_seconds, 1e-3)))
                self._store.set("keepstep/stop", str(step + margin))
            self.stop_at = self._find("keepstep/stop")

    def _find(self, key: str) -> int | None:
        return int(self._store.get(key)) if self._store.check([key]) else None
