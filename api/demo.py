"""`keepstep demo`: a real training job, a real kill -9 of one of its processes, the recovery, and the proof that it was exact.

The same job is run again without a kill: both must end with the same weights, bit for bit, or the demo fails.

Invariant: whatever happens (an error, Ctrl-C, a timeout), nothing of it keeps running and its temporary state folder is removed; the
folder is kept only when something of it could not be ended, and then the user is told.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from api import jobfile
from api.client import Client, LogEvent, ref_path
from orchestrator.settings import stored_token

EXAMPLE = Path(__file__).parents[1] / "examples" / "shakespeare" / "job.yaml"
STEPS = 300
KILL_AT = 100
LIMIT_S = 300
SHOW_EVERY = 50
STEP_LINE = re.compile(r"step=(\d+) loss=([\d.]+)")
WEIGHTS_LINE = re.compile(r"weights=([0-9a-f]{64})")
OWN = ("KEEPSTEP_SERVER", "KEEPSTEP_TOKEN", "KEEPSTEP_DATABASE_URL", "KEEPSTEP_RAY_ADDRESS", "KEEPSTEP_STORAGE")


class DemoFailed(Exception):
    """It did not go as it must; the text says what was seen."""


class NotEnded(Exception):
    """`keepstep down` failed; the text is what it said."""


def run() -> int:
    """Exit code: 0 when the job lost a rank and ended with the weights of an unbroken run, 1 otherwise, 130 after Ctrl-C."""
    console = Console(highlight=False)
    if not EXAMPLE.is_file():
        console.print(f"the demo needs the examples of the repository ({EXAMPLE} is missing)")
        return 1
    for name in OWN:  # of another server, which the demo must not touch
        os.environ.pop(name, None)
    folder = Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    try:
        with _signals(), _server(folder, console) as client:
            _play(client, console)
        return 0
    except NotEnded as error:
        if isinstance(error.__context__, DemoFailed | TimeoutError):
            console.print(f"[red]the demo failed:[/] {escape(str(error.__context__))}")
        console.print(f"[red]something still runs:[/] {escape(str(error))}\nend it with: keepstep down --state-dir {folder}")
        return 1
    except (DemoFailed, TimeoutError) as error:
        console.print(f"[red]the demo failed:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped; everything is ended")
        return 130


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends it like Ctrl-C, and so does the time limit."""

    def terminate(*_: object) -> None:
        raise KeyboardInterrupt

    def too_late(*_: object) -> None:
        raise TimeoutError(f"not done after {LIMIT_S} s")

    before = signal.signal(signal.SIGTERM, terminate), signal.signal(signal.SIGALRM, too_late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])


@contextmanager
def _server(folder: Path, console: Console) -> Iterator[Client]:
    """`keepstep up` with two local nodes on a free port; `keepstep down` at the end."""
    console.print("[bold]1.[/] keepstep up --nodes 2   (SQLite, Ray with two local nodes, control loop, API)")
    started = time.monotonic()
    log = (folder / "up.log").open("w+")
    keepstep = [sys.executable, "-m", "api.cli"]
    state = ["--state-dir", str(folder)]
    # A session of its own: a Ctrl-C in the terminal is for the demo, which then ends things in order.
    up = subprocess.Popen(
        [*keepstep, "up", "--nodes", "2", "--port", "0", "--json", *state], stdout=subprocess.PIPE, stderr=log, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        line = up.stdout.readline()
        token = stored_token(folder)
        if not line or token is None:
            log.seek(0)
            raise DemoFailed(f"the server did not start: {log.read()[-2000:]}")
        address = json.loads(line)["address"]
        console.print(f"   listens at {address} after {time.monotonic() - started:.1f} s")
        client = Client(address, token)
        try:
            yield client
        finally:
            client.close()
    finally:
        signal.alarm(0)
        before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]  # the end must not be interrupted
        down = subprocess.run([*keepstep, "down", *state], capture_output=True, text=True, check=False)
        up.kill()
        up.wait()
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
        log.close()
        if down.returncode != 0:
            raise NotEnded(down.stderr[-2000:])
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Trained:
    """What one run of the example left: the hash of its weights, what it wrote, and how it went."""

    weights: str | None
    text: str
    again: int
    incidents: list[dict[str, Any]]


def require_equal(interrupted: Trained, unbroken: Trained) -> None:
    """Raises DemoFailed unless one run recovered from the kill, the other met nothing, and both end with the same weights."""
    if not any(i["recovery_seconds"] is not None for i in interrupted.incidents):
        raise DemoFailed("the kill left no recovered incident")
    if unbroken.incidents:
        raise DemoFailed(f"the run without a kill did not stay unbroken: {unbroken.incidents[0]['message']}")
    if interrupted.weights is None or unbroken.weights is None:
        raise DemoFailed("a run ended without the hash of its weights")
    if interrupted.weights != unbroken.weights:
        raise DemoFailed(f"the weights differ: {interrupted.weights} with the kill, {unbroken.weights} without it")


def _play(client: Client, console: Console) -> None:
    interrupted = _Training(client, console, "interrupted", kill_at=KILL_AT).follow()
    unbroken = _Training(client, console, "unbroken", kill_at=None).follow()
    require_equal(interrupted, unbroken)
    lost = sum(i["recovery_seconds"] or 0.0 for i in interrupted.incidents)
    console.print("[bold]6.[/] what the trained model writes, and the SHA-256 of its weights:\n")
    console.print(interrupted.text, style="cyan", markup=False)
    console.print(f"\n   interrupted   {interrupted.weights}\n   unbroken      {unbroken.weights}", soft_wrap=True)
    console.print(
        f"\n[bold green]EQUAL, bit for bit.[/] The kill cost {lost:.2f} s and {_steps(interrupted.again)} done again; "
        "nobody had to do anything.",
        soft_wrap=True,
    )


class _Training:
    """One run of the example, shown while it goes; with ``kill_at``, rank 1 is killed once that step is finished."""

    def __init__(self, client: Client, console: Console, name: str, kill_at: int | None) -> None:
        self._client, self._console, self._name, self._kill_at = client, console, name, kill_at
        self._job = ""
        self._steps: list[int] = []
        self._killed = self._told = False
        self._weights: str | None = None
        self._written: list[str] = []

    def follow(self) -> Trained:
        spec, code = jobfile.read(EXAMPLE)
        spec |= {"name": self._name, "command": ["python", "train.py", "--steps", str(STEPS)]}
        self._job = self._client.submit(jobfile.with_bundle(self._client, spec, code))["id"]
        number, kind = ("2", "PyTorch DDP on 2 nodes") if self._kill_at else ("5", "the same, undisturbed")
        self._console.print(
            f"[bold]{number}.[/] keepstep submit -f {EXAMPLE.parent.name}/{EXAMPLE.name}   ({self._job}: {kind})", soft_wrap=True
        )
        columns = (TextColumn("   step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]}"))
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as progress:
            task = progress.add_task("", total=STEPS, loss="-")
            for event in self._client.follow(ref_path(self._job, "logs"), None, rank=0):
                if event.kind == "log" and (found := STEP_LINE.search(event.data["text"])):
                    progress.update(task, completed=int(found[1]), loss=found[2])
                    self._step(int(found[1]), found[2], event)
                elif event.kind == "log" and self._steps:
                    self._last_words(event.data["text"])
        return self._ended()

    def _step(self, step: int, loss: str, event: LogEvent) -> None:
        self._steps.append(step)
        self._weights = None
        self._written.clear()
        if step % SHOW_EVERY == 0 or step == 1:
            self._console.print(f"   step {step:4d}   loss {loss}   generation {event.data['generation']}")
        if self._kill_at is not None and not self._killed and step >= self._kill_at:
            self._kill(step)
        elif self._killed and not self._told and event.data["generation"] > 0:
            self._tell_recovery()

    def _last_words(self, text: str) -> None:
        if found := WEIGHTS_LINE.search(text):
            self._weights = found[1]
        else:
            self._written.append(text)

    def _kill(self, step: int) -> None:
        victim = next(rank for rank in self._client.every(ref_path(self._job, "ranks")) if rank["rank"] == 1)
        os.kill(victim["pid"], signal.SIGKILL)
        self._killed = True
        self._console.print(f"[bold]3.[/] [red]kill -9 {victim['pid']}[/]   (rank 1, in the middle of the run, at step {step})")

    def _incidents(self) -> list[dict[str, Any]]:
        return list(self._client.every(ref_path(self._job, "incidents")))

    def _tell_recovery(self) -> None:
        for incident in self._incidents():
            if incident["recovery_seconds"] is not None:
                self._told = True
                phases = ", ".join(f"{name} {ms:.0f}" for name, ms in incident["phases_ms"].items())
                seconds, again = incident["recovery_seconds"], _steps(incident["lost_steps"])
                self._console.print(
                    f"[bold]4.[/] [green]recovered in {seconds:.2f} s[/], {again} to do again, "
                    f"state from {incident['restored_from']}\n   {escape(incident['message'])}\n   phases in ms: {phases}"
                )

    def _ended(self) -> Trained:
        job = self._client.get(ref_path(self._job))
        if job["state"] != "SUCCEEDED":
            raise DemoFailed(f"the job ended as {job['state']}: {job['message']}")
        if self._killed and not self._told:
            self._tell_recovery()
        missing = sorted(set(range(1, STEPS + 1)) - set(self._steps))
        if missing:
            raise DemoFailed(f"steps {missing[:10]} were never finished")
        return Trained(self._weights, "".join(self._written).strip(), len(self._steps) - STEPS, self._incidents())


def _steps(count: int | None) -> str:
    return "an unknown number of steps" if count is None else f"{count} step{'' if count == 1 else 's'}"
