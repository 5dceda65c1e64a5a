"""Simulated time, the dice of one run, and actions that take no time."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass
class SimClock:
    """Seconds since a made-up epoch; moves only when told to."""

    at: float = 1_800_000_000.0

    def now(self) -> float:
        return self.at


@dataclass
class Dice:
    """All that is random in a run, from one seed. ``faults`` is False when faults have stopped."""

    seed: int
    faults: bool = True
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def fault(self, chance: float) -> bool:
        """True with that chance, never after faults have stopped. Rolls in both cases, so that a run is the same up to there."""
        return self.random.random() < chance and self.faults

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)


def at_once(work: Callable[[], bool]) -> Future[bool]:
    """``submit`` of an executor without threads; a Crash passes."""
    done: Future[bool] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


class Crash(BaseException):
    """The control plane's process ends here; not an Exception, so nothing but the driver catches it."""
