"""What a benchmark needs of a system under test: start what it needs once, submit the training, read the ranks' own logs, end it.

Invariants: all that a system starts is ended by its own process ids, all its files are below the folder that it is given; a time is
either when a rank wrote its line or when we sent a signal or a command, all by the clock of this machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import psutil

SCRIPTS = Path(__file__).parents[1] / "scripts"
START_LIMIT_S = 120.0
END_S = 10.0  # from SIGTERM to SIGKILL


class Step(NamedTuple):
    """One finished step as a rank logged it."""

    at: float
    step: int
    pid: int


@dataclass
class Job:
    """One submitted training. ``incidents``: what the system itself says of its recoveries, where it says anything."""

    folder: Path
    ranks: int
    submitted_at: float
    incidents: Callable[[], list[dict[str, Any]]] = list
    _seen: dict[int, list[Step]] = field(default_factory=dict)
    _read: dict[int, int] = field(default_factory=dict)

    def steps(self, rank: int = 0) -> list[Step]:
        """All that the rank logged so far, oldest first; of all its processes."""
        seen = self._seen.setdefault(rank, [])
        with suppress(FileNotFoundError), (self.folder / f"rank-{rank}").open("rb") as file:
            file.seek(self._read.get(rank, 0))
            lines = file.read().splitlines()
            self._read[rank] = file.tell()
            seen += [Step(float(at), int(step), int(pid)) for at, step, pid in (line.split() for line in lines)]
        return seen

    def kill_last_rank(self) -> float:
        """SIGKILL to the process that logged the last rank's newest step; returns when. Raises ProcessLookupError when it is gone."""
        pid = self.steps(self.ranks - 1)[-1].pid
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at


class Service(Protocol):
    """A system that is up and takes jobs, one after the other."""

    def submit(self, folder: Path, ranks: int) -> AbstractContextManager[Job]:
        """The training, in an empty folder of its own; ended and gone when the context ends."""


class System(Protocol):
    name: str

    def up(self, folder: Path) -> AbstractContextManager[Service]:
        """Whatever must run before a job can be submitted."""


def end_in_order() -> None:
    """SIGTERM, as a time limit sends it, ends a benchmark like Ctrl-C: everything that it started goes with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def wait_for(check: Callable[[], Any], limit_s: float, what: str) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(0.01)
    raise TimeoutError(f"{what}: not within {limit_s:.0f} s")


def environment() -> dict[str, str]:
    """The caller's, without what would lead to a server or a cluster of somebody else."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "RAY_"))} | {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def program(*command: str, env: Mapping[str, str], output: IO[str]) -> Iterator[None]:
    """A Python program of this environment in a session of its own; at the end it and all its descendants are gone."""
    process = subprocess.Popen(
        [sys.executable, *command], env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            end_tree(psutil.Process(process.pid))
        process.wait()


def end_tree(root: psutil.Process) -> None:
    """SIGTERM to the root, and after a while SIGKILL to it and to every descendant that it had."""
    below = root.children(recursive=True)
    with suppress(psutil.NoSuchProcess):
        root.terminate()
    psutil.wait_procs([root], timeout=END_S)
    left = [root, *below]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()  # psutil checks the start time: a pid that somebody else has by now is left alone
    psutil.wait_procs(left, timeout=END_S)
