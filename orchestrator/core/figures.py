"""What can be counted over all jobs: the numbers behind ``/metrics``. PURE values.

They come from SQL, not from counters in a process, so they survive restarts of the server and are the same on each of several servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.states import JobState

# Upper bounds of the buckets, in seconds. A restart in place takes a fraction of a second, a wait in a queue may take days.
RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
WAIT_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)


@dataclass(frozen=True)
class Spread:
    """A histogram. ``within``: how many values were at most each of ``bounds``; ``count`` of all values and their ``total``, seconds."""

    bounds: tuple[float, ...]
    within: tuple[int, ...]
    count: int
    total: float


@dataclass(frozen=True)
class Figures:
    """``queue_wait``: from submit to the first attempt; ``start``: from submit to the first step. ``recovery`` and ``lost_steps``: of
    failures that were recovered from, by cause. ``failures``: all of them, by cause and class. Drills are left out."""

    jobs: dict[JobState, int]
    unreachable: int
    queue_wait: Spread
    start: Spread
    recovery: dict[str, Spread] = field(default_factory=dict)
    lost_steps: dict[str, int] = field(default_factory=dict)
    failures: dict[tuple[str, str], int] = field(default_factory=dict)
    checkpoints: int = 0
