"""What training pays for KeepStep while nothing fails: the same script bare and with KeepStep's API, in turns.

``python benchmarks/overhead.py [--steps-ms 20 200] [--pairs 5] [--seconds 20]``; a quick look: ``--pairs 1 --seconds 5``. Each turn starts
everything anew, so that a bare turn has the machine to itself: no server, no Ray. Snapshots ``auto``, a checkpoint about every ten seconds.
A step's time is the mean over the whole turn, so it holds whatever snapshots, checkpoints and KeepStep's other processes cost. Every
second pair begins with the other, so that drift cancels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from kills import first_step
from recovery import spread
from systems.bare import Bare
from systems.keepstep import KeepStep
from systems.system import Job, System, end_in_order

SCRIPT = "steady.py"
SETTLE_S = 5.0  # from the first step until the snapshot interval has been found
CHECKPOINT_S = 10.0
MARK = "BENCH_HOME"  # in the environment of all that a turn starts


@dataclass(frozen=True)
class Turn:
    """Seconds of a step, seconds of each ``run.step`` of rank 0 (none without KeepStep), and how much of one core all else of it took."""

    step: float
    inside: list[float]
    beside: float


def measure(system: System, ranks: int, seconds: float) -> Turn:
    with tempfile.TemporaryDirectory(prefix="ks-bench-") as home:
        os.environ[MARK] = home
        for name in ("service", "job"):
            (Path(home) / name).mkdir()
        with system.up(Path(home) / "service") as service, service.submit(Path(home) / "job", ranks) as job:
            first_step(job)
            time.sleep(SETTLE_S)
            return watch(job, Path(home), seconds)


def watch(job: Job, home: Path, seconds: float) -> Turn:
    pids = {job.steps(rank)[-1].pid for rank in range(job.ranks)}
    others = [process for process in psutil.process_iter() if process.pid not in pids and belongs(process, home)]
    before = sum(map(cpu_seconds, others))
    begin = job.steps()[-1]
    time.sleep(seconds)
    end = job.steps()[-1]
    beside = (sum(map(cpu_seconds, others)) - before) / seconds
    log = job.folder / "inside-0"
    inside = [float(line) for line in log.read_text().splitlines()[begin.step : end.step]] if log.exists() else []
    return Turn((end.at - begin.at) / (end.step - begin.step), inside, beside)


def belongs(process: psutil.Process, home: Path) -> bool:
    """It was started for this turn, by whatever way."""
    try:
        return process.environ().get(MARK) == str(home)
    except psutil.Error:
        return False


def cpu_seconds(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def pair(step_ms: int) -> tuple[System, System]:
    """(bare, with KeepStep): one node with all ranks, so that no second agent shares their cores."""
    env = {"BENCH_STEP_MS": str(step_ms)}
    checkpoint = {"every_steps": round(CHECKPOINT_S * 1000 / step_ms)}
    return Bare("bare", SCRIPT, env), KeepStep("KeepStep", SCRIPT, checkpoint, nodes=1, env=env)


def row(step_ms: int, turns: list[tuple[Turn, Turn]]) -> str:
    """Of (bare, with KeepStep) turns."""
    cells = [f"{step_ms} ms"]
    cells += [spread((turn.step * 1000 for turn in side), 2) for side in zip(*turns, strict=True)]
    cells.append(spread((kept.step / bare.step for bare, kept in turns), 4))
    kept = [kept for _, kept in turns]
    inside = [seconds for turn in kept for seconds in turn.inside]
    cells.append(f"{statistics.median(inside) * 1000:.3f} / {statistics.fmean(inside) * 1000:.3f} / {max(inside) * 1000:.3f}")
    cells.append(f"{statistics.median(sum(turn.inside) / len(turn.inside) / turn.step for turn in kept):.2%}")
    cells.append(f"{statistics.median(turn.beside for turn in kept):.1%}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps-ms", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20, help="of a turn that count")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    end_in_order()
    rows = []
    for step_ms in args.steps_ms:
        turns = []
        for number in range(args.pairs):
            systems = pair(step_ms)
            order = systems if number % 2 == 0 else systems[::-1]
            seen = {system.name: measure(system, args.ranks, args.seconds) for system in order}
            turns.append((seen["bare"], seen["KeepStep"]))
            bare, kept = turns[-1]
            print(f"{step_ms} ms: {bare.step * 1000:.3f} ms bare, {kept.step * 1000:.3f} ms, {kept.step / bare.step - 1:+.2%}", flush=True)
        rows.append(row(step_ms, turns))
    print(f"\n{args.ranks} ranks, {args.pairs} pairs of {args.seconds:.0f} s; median / min / max of the pairs\n")
    print("| step | bare, ms | with KeepStep, ms | ratio | run.step, ms: median / mean / max | its share | all else, of one core |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
