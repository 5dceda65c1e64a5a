"""The restore test: a checkpoint is read back on its node as a restart would read it, in a child that was forked for it.

What it proves: storage gives the bytes back, they fit into shared memory, this node's ranks can build their state from them without a
pickle, that state is bit for bit the snapshot that was saved (where it is still in memory), and the random generators take theirs. What it
does not prove: that the script makes the same parts again and that they accept their state, for that would run user code twice.

Invariants: never in a rank; lowest priority; ended by the kernel after LIMIT_S; nothing is left in shared memory but the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint.catalog import problem_of, stage, unstage
from workers.checkpoint.format import MANIFEST, parse_manifest
from workers.checkpoint.reader import Restored, read_snapshot, read_staged
from workers.checkpoint.storage import open_folder
from workers.checkpoint.tree import StateError, flatten, is_torch
from workers.messages import Problem, Unfit

TRIAL_ANSWER = "trial.json"
STAGED = "trial"
LIMIT_S = 300
SPARE = 2  # so many times its size must be free, that the test takes no room from snapshots


@dataclass(frozen=True)
class RestoreTrial:
    """``problem``: why a restart from this checkpoint would fail; ``damaged``: for what it holds; ``skipped``: why nothing
    was tried; ``compared``: with the snapshot."""

    seconds: float
    problem: str | None = None
    damaged: bool = False
    skipped: str | None = None
    compared: bool = False


def read_answer(path: Path) -> RestoreTrial | None:
    try:
        return RestoreTrial(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def clear(shm: Path) -> None:
    """Remove what a test that was ended has left in shared memory."""
    for left in (shm / STAGED, *shm.glob(f".{STAGED}.*")):
        shutil.rmtree(left, ignore_errors=True)


def run_trial(config: dict[str, Any], order: dict[str, Any]) -> None:
    """The child's whole life."""
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    with contextlib.suppress(OSError):
        os.nice(19)  # not SCHED_IDLE: where ranks use every core that would never end, and the next checkpoint waits for it
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory ends, this ends first
    shm = Path(config["shm"])
    answer = try_restore(shm, order["url"], order["step"], order["ranks"], order["world_size"])
    fresh = shm / f".{TRIAL_ANSWER}"
    fresh.write_text(json.dumps(asdict(answer)))
    os.replace(fresh, shm / TRIAL_ANSWER)


def try_restore(shm: Path, url: str, step: int, ranks: Sequence[int], world_size: int) -> RestoreTrial:
    """``ranks``: those of this node. Raises nothing."""
    begun = time.monotonic()
    compared = False
    problem: Problem | None = None
    try:
        skipped = _no_room(shm, url)
        if skipped is not None:
            return RestoreTrial(time.monotonic() - begun, skipped=skipped)
        problem = stage(url, shm, STAGED, ranks, world_size)
        if problem is not None and problem.why is Unfit.NO_ROOM:
            return RestoreTrial(time.monotonic() - begun, skipped=problem.text)
        if problem is None:
            for rank in ranks:
                restored = read_staged(shm / STAGED, rank, world_size)
                compared = _compare(shm, rank, ranks, restored, step)
                _set_random(restored)
    except (StateError, OSError) as error:
        problem = problem_of(error)
    except Exception as error:  # whatever it is, a restart would meet it too
        problem = Problem(Unfit.DAMAGED, f"{type(error).__name__}: {error}")
    finally:
        unstage(shm, STAGED)
    if problem is None:
        return RestoreTrial(time.monotonic() - begun, compared=compared)
    return RestoreTrial(time.monotonic() - begun, problem.text, damaged=problem.why is Unfit.DAMAGED, compared=compared)


def _no_room(shm: Path, url: str) -> str | None:
    manifest = parse_manifest(b"".join(open_folder(url).read(MANIFEST)))
    needed, free = SPARE * sum(file.bytes for file in manifest.files), shutil.disk_usage(shm).free
    if needed > free:
        return f"the test wants {needed} bytes free in {shm} and {free} are"
    return None


def _compare(shm: Path, rank: int, ranks: Sequence[int], restored: Restored, step: int) -> bool:
    """False where the snapshot is gone. Raises StateError where it differs."""
    try:
        saved = read_snapshot(shm, rank, ranks, step)
    except StateError:
        return False
    for name in ("shared", "own"):
        difference = first_difference(getattr(saved, name), getattr(restored, name), name)
        if difference is not None:
            raise StateError(f"rank {rank}: {difference} is not what the snapshot of step {step} holds")
    return True


def first_difference(one: Any, other: Any, root: str) -> str | None:
    """Path of the first place where two trees differ in a bit or a type; None: they are equal."""
    (shape, leaves), (other_shape, other_leaves) = flatten(one, root), flatten(other, root)
    for (path, leaf), (other_path, other_leaf) in zip(leaves, other_leaves, strict=False):
        if path != other_path or type(leaf) is not type(other_leaf) or _bytes(leaf) != _bytes(other_leaf):
            return path
    return root if shape != other_shape or len(leaves) != len(other_leaves) else None


def _bytes(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    if is_torch(leaf):
        import torch

        return str(leaf.dtype), tuple(leaf.shape), leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(leaf.dtype), tuple(leaf.shape), leaf.tobytes()


def _set_random(restored: Restored) -> None:
    """In this process only, which ends with the test."""
    state = restored.own.get("random") if isinstance(restored.own, dict) else None
    if not isinstance(state, dict) or "python" not in state:
        return
    from workers.frameworks.plain import set_random_state

    set_random_state(state)
    if "torch" in state and "torch" in sys.modules:
        import torch

        torch.set_rng_state(state["torch"])
