"""How often to write a checkpoint when the spec says ``auto``. PURE.

Young's first-order optimum (J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
1974), which J. T. Daly ("A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), 2006) confirms where the cost is small against the time between failures:

    interval = sqrt(2 x cost x mean time between failures)

``cost`` is the measured time of a write. Agents write while training goes on, so a write costs training less than its duration, and the
formula with the whole duration is cautious: it asks for the interval that would be right if training stood still. What a long write really
bounds is the next one, for there is one in flight: an interval is at least twice the write, so that storage is idle half of the time.

The mean time between failures is (time run + PRIOR_S) / (failures + 1): one failure a day is assumed until the job's own record says more.
This is the mean of a gamma prior worth one failure in PRIOR_S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

PRIOR_S = 86_400.0
FIRST_S = 30.0  # nothing was measured yet: the first checkpoint also shows early whether storage works
LEAST_S, MOST_S = 5.0, 3_600.0
WRITES = 5  # the newest, whose median is the cost


def mean_time_between_failures(run_s: float, failures: int) -> float:
    """Seconds. ``run_s``: how long the job was watched."""
    return (max(0.0, run_s) + PRIOR_S) / (failures + 1)


def auto_interval(write_seconds: Sequence[float], run_s: float, failures: int) -> float:
    """Seconds from one commit to the next request. ``write_seconds``: of the writes so far, oldest first."""
    if not write_seconds:
        return FIRST_S
    cost = median(write_seconds[-WRITES:])
    best = math.sqrt(2.0 * cost * mean_time_between_failures(run_s, failures))
    return max(LEAST_S, 2.0 * cost, min(best, MOST_S))
