"""kill -9 of a rank to the next new step, beside torchrun and Ray Train: the same training on the same machine in one run.

``python benchmarks/recovery.py [--kills 5] [--ranks 2 4] [--systems api torchrun ...]``. Each system is started once and gets
``--starts`` submits; the last of them is killed. Every time is from the ranks' own logs; only ratios mean something on another machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kills import Cost, first_step, kill, settle
from systems import SYSTEMS
from systems.system import Service, System, end_in_order

PHASES = ("detect", "stop", "launch", "restore", "first_step")


@dataclass
class Measured:
    """Seconds from submit to first step, seconds of an undisturbed step, costs of kills, and what the system itself says of them."""

    starts: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)

    @property
    def recoveries(self) -> list[float]:
        return [c.seconds for c in self.costs]


def measure(system: System, folder: Path, ranks: int, starts: int, kills: int) -> Measured:
    seen = Measured()
    with ExitStack() as stack:
        (home := folder / "service").mkdir()
        service = stack.enter_context(system.up(home))
        while len(seen.starts) < starts or len(seen.costs) < kills:
            one_job(service, folder / f"job-{len(seen.starts)}", ranks, seen, kills if len(seen.starts) >= starts - 1 else 0)
    return seen


def one_job(service: Service, folder: Path, ranks: int, seen: Measured, kills: int) -> None:
    """One submit, and kills until there are enough or one that the system does not come back from."""
    folder.mkdir()
    with service.submit(folder, ranks) as job:
        seen.starts.append(first_step(job).at - job.submitted_at)
        while len(seen.costs) < kills:
            seen.costs.append(kill(job))
            if math.isinf(seen.costs[-1].seconds):
                break
        if kills and not math.isinf(seen.costs[-1].seconds):
            settle(job)  # incidents are closed a moment after the step that ends them
        seen.incidents += [i for i in job.incidents() if i["recovery_seconds"] is not None]
        steps = job.steps()
        seen.step_seconds += [b.at - a.at for a, b in pairwise(steps) if a.pid == b.pid]


def spread(values: Iterable[float], digits: int = 3) -> str:
    values = list(values)
    if not values:
        return "-"
    return " / ".join("never" if math.isinf(v) else f"{v:.{digits}f}" for v in (statistics.median(values), min(values), max(values)))


def ratio(peer: Measured, ours: Measured) -> str:
    """Median, and the least and the most that two single kills differ by."""
    theirs, mine = peer.recoveries, ours.recoveries
    each = statistics.median(theirs) / statistics.median(mine), min(theirs) / max(mine), max(theirs) / min(mine)
    return " / ".join("never" if math.isinf(v) else f"{v:.0f}" for v in each)


def table(ranks: int, seen: dict[str, Measured]) -> str:
    lines = [
        f"{ranks} ranks; median / min / max",
        "",
        "| | kill to next new step, s | steps done again, median (most) | times KeepStep | submit to first step, s | step, ms |",
        "|---|---|---|---|---|---|",
    ]
    for key, of in seen.items():
        again = [c.again for c in of.costs if not math.isinf(c.seconds)]
        lost = f"{statistics.median(again):g} ({max(again)})" if again else "-"
        compared = ratio(of, seen["api"]) if "api" in seen and key != "api" and of.costs else ""
        step = f"{statistics.median(of.step_seconds) * 1000:.1f}" if of.step_seconds else "-"
        lines.append(f"| {SYSTEMS[key].name} | {spread(of.recoveries)} | {lost} | {compared} | {spread(of.starts)} | {step} |")
    return "\n".join(lines)


def phases(measured: Measured) -> str:
    """What the incidents say, and how far that is from the ranks' log."""
    told = [i["recovery_seconds"] for i in measured.incidents]
    if len(told) != len(measured.costs) or not told:
        return f"incidents: {len(told)} for {len(measured.costs)} kills"
    apart = max(abs(a - b) for a, b in zip(measured.recoveries, told, strict=True))
    parts = ", ".join(f"{p} {statistics.median(i['phases_ms'].get(p, 0.0) for i in measured.incidents):.0f}" for p in PHASES)
    return f"recovery by the incidents {spread(told)} s, at most {apart * 1000:.0f} ms from the ranks' log; phases, median ms: {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--raw", type=Path, help="write every single number to this file, as JSON")
    args = parser.parse_args()
    end_in_order()
    raw: dict[int, dict[str, Any]] = {}
    for ranks in args.ranks:
        seen: dict[str, Measured] = {}
        for key in args.systems:
            with tempfile.TemporaryDirectory(prefix="ks-bench-") as folder:
                seen[key] = measure(SYSTEMS[key], Path(folder), ranks, args.starts, args.kills)
            print(f"{SYSTEMS[key].name}, {ranks} ranks: {' '.join(f'{c.seconds:.3f}({c.again})' for c in seen[key].costs)}", flush=True)
            if key == "api":  # a script that reports no steps has no such phases
                print(f"  {phases(seen[key])}", flush=True)
        print(f"\n{table(ranks, seen)}\n", flush=True)
        raw[ranks] = {key: {"starts": m.starts, "costs": m.costs, "incidents": m.incidents} for key, m in seen.items()}
    if args.raw:
        args.raw.write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
