"""Goodput under one kill a minute: the share of the time that went into new steps. KeepStep, torchrun and Ray Train, one after the other.

``python benchmarks/goodput.py [--seconds 300] [--every 60] [--ranks 2]``; a quick look: ``--seconds 90 --every 20``.

Goodput = (new steps x undisturbed step time) / time. The clock runs from the first step, and the first kill comes after half an interval,
so that every recovery lies inside. A step done again counts once. The undisturbed step time is the system's own, its own saving included:
the mean over the stretches between a settled training and the next kill. A system that does not come back is left as it is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kills import Cost, cost, first_step
from recovery import spread
from systems import SYSTEMS
from systems.system import Job, Step, System, end_in_order

SETTLE_S = 2.0  # after the first step of a process


@dataclass(frozen=True)
class Measured:
    goodput: float
    new_steps: int
    step_seconds: float
    costs: list[Cost]
    kills: int


def measure(system: System, folder: Path, ranks: int, seconds: float, every: float) -> Measured:
    for name in ("service", "job"):
        (folder / name).mkdir()
    with system.up(folder / "service") as service, service.submit(folder / "job", ranks) as job:
        begin = first_step(job).at
        killed = disturb(job, begin, seconds, every)
        return judge([s for s in job.steps() if s.at <= begin + seconds], killed, seconds)


def disturb(job: Job, begin: float, seconds: float, every: float) -> list[float]:
    """Kill the last rank each ``every`` seconds until the end; returns when. A rank that does not run yet is not there to be killed."""
    killed = []
    at = begin + every / 2
    while at < begin + seconds:
        time.sleep(max(0.0, at - time.time()))
        try:
            killed.append(job.kill_last_rank())
        except ProcessLookupError:
            print("  no kill: the rank of the last one is not back", flush=True)
        at += every
    time.sleep(max(0.0, begin + seconds - time.time()))
    return killed


def judge(steps: list[Step], killed: list[float], seconds: float) -> Measured:
    """``steps``: rank 0's, from the first one to the end of the time."""
    new = max(s.step for s in steps)
    step_seconds = undisturbed(steps, killed)
    costs = [found for at in killed if (found := cost(steps, at)) is not None]
    return Measured(new * step_seconds / seconds, new, step_seconds, costs, len(killed))


def undisturbed(steps: list[Step], killed: list[float]) -> float:
    """Mean seconds of a step, far enough from kills and restarts."""
    started: dict[int, float] = {}
    gaps = []
    for before, after in pairwise(steps):
        began = started.setdefault(before.pid, before.at)
        hit = any(before.at <= at <= after.at + SETTLE_S / 10 for at in killed)
        if before.pid == after.pid and before.at >= began + SETTLE_S and not hit:
            gaps.append(after.at - before.at)
    return statistics.fmean(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["api", "torchrun", "ray"])
    args = parser.parse_args()
    end_in_order()
    rows = []
    for key in args.systems:
        with tempfile.TemporaryDirectory(prefix="ks-bench-") as folder:
            seen = measure(SYSTEMS[key], Path(folder), args.ranks, args.seconds, args.every)
        back = f"{len(seen.costs)} of {seen.kills}"
        rows.append(
            f"| {SYSTEMS[key].name} | {seen.goodput:.2%} | {seen.new_steps} | {seen.step_seconds * 1000:.1f} | {back} "
            f"| {spread(c.seconds for c in seen.costs)} | {sum(c.again for c in seen.costs)} |"
        )
        print(rows[-1], flush=True)
    print(f"\n{args.ranks} ranks, {args.seconds:.0f} s, a kill every {args.every:.0f} s\n")
    print("| | goodput | new steps | undisturbed step, ms | came back | kill to next new step, s: median / min / max | steps done again |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
