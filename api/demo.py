"""`keepstep demo`: a real training job on this machine, a real kill -9 of one of its processes, and the recovery, for people to watch.

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
OWN = ("KEEPSTEP_SERVER", "KEEPSTEP_TOKEN", "KEEPSTEP_DATABASE_URL", "KEEPSTEP_RAY_ADDRESS", "KEEPSTEP_STORAGE")


class DemoFailed(Exception):
    """It did not go as it must; the text says what was seen."""


class NotEnded(Exception):
    """`keepstep down` failed; the text is what it said."""


def run() -> int:
    """Exit code: 0 when the job lost a rank and ended as if nothing had happened, 1 otherwise, 130 after Ctrl-C."""
    console = Console(highlight=False)
    if not EXAMPLE.is_file():
        console.print(f"the demo needs the examples of the repository ({EXAMPLE} is missing)")
        return 1
    for name in OWN:  # of another server, which the demo must not touch
        os.environ.pop(name, None)
    folder = Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    try:
        with _signals(), _server(folder, console) as client:
            _Show(client, console).play()
        return 0
    except NotEnded as error:
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


class _Show:
    """One run of the example; keeps what it has seen."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client, self._console = client, console
        self._steps: list[int] = []
        self._killed_at: int | None = None
        self._incident: dict[str, Any] | None = None
        self._sample: list[str] = []

    def play(self) -> None:
        spec, code = jobfile.read(EXAMPLE)
        spec["command"] = ["python", "train.py", "--steps", str(STEPS)]
        job = self._client.submit(jobfile.with_bundle(self._client, spec, code))
        self._console.print(f"[bold]2.[/] keepstep submit -f {EXAMPLE.parent.name}/{EXAMPLE.name}   ({job['id']}: PyTorch DDP, 2 nodes)")
        started = time.monotonic()
        columns = (TextColumn("   step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]}"))
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as progress:
            task = progress.add_task("", total=STEPS, loss="-")
            for event in self._client.follow(ref_path(job["id"], "logs"), None, rank=0):
                if event.kind == "log" and (found := STEP_LINE.search(event.data["text"])):
                    progress.update(task, completed=int(found[1]), loss=found[2])
                    self._step(job["id"], int(found[1]), found[2], event)
                elif event.kind == "log" and self._steps and not event.data["text"].startswith("weights="):
                    self._sample.append(event.data["text"])
        self._summary(self._client.get(ref_path(job["id"])), time.monotonic() - started)

    def _step(self, job_id: str, step: int, loss: str, event: LogEvent) -> None:
        self._steps.append(step)
        self._sample.clear()
        if step % SHOW_EVERY == 0 or step == 1:
            self._console.print(f"   step {step:4d}   loss {loss}   generation {event.data['generation']}")
        if self._killed_at is None and step >= KILL_AT:
            self._kill(job_id, step)
        elif self._killed_at is not None and self._incident is None and event.data["generation"] > 0:
            self._find_incident(job_id)

    def _kill(self, job_id: str, step: int) -> None:
        victim = next(rank for rank in self._client.every(ref_path(job_id, "ranks")) if rank["rank"] == 1)
        os.kill(victim["pid"], signal.SIGKILL)
        self._killed_at = step
        self._console.print(f"[bold]3.[/] [red]kill -9 {victim['pid']}[/]   (rank 1, in the middle of the run, at step {step})")

    def _find_incident(self, job_id: str) -> None:
        for incident in self._client.every(ref_path(job_id, "incidents")):
            if incident["recovery_seconds"] is not None:
                self._incident = incident
                phases = ", ".join(f"{name} {ms:.0f}" for name, ms in incident["phases_ms"].items())
                seconds, again = incident["recovery_seconds"], _steps(incident["lost_steps"])
                self._console.print(
                    f"[bold]4.[/] [green]recovered in {seconds:.2f} s[/], {again} to do again, "
                    f"state from {incident['restored_from']}\n   {escape(incident['message'])}\n   phases in ms: {phases}"
                )

    def _summary(self, job: dict[str, Any], seconds: float) -> None:
        if job["state"] != "SUCCEEDED":
            raise DemoFailed(f"the job ended as {job['state']}: {job['message']}")
        if self._incident is None:
            self._find_incident(job["id"])
        if self._incident is None:
            raise DemoFailed("the kill left no recovered incident")
        missing = sorted(set(range(1, STEPS + 1)) - set(self._steps))
        if missing:
            raise DemoFailed(f"steps {missing[:10]} were never finished")
        again = len(self._steps) - STEPS
        self._console.print("[bold]5.[/] what the trained model writes:\n")
        self._console.print("".join(self._sample).strip(), style="cyan", markup=False)
        self._console.print(
            f"\n[bold]SUCCEEDED[/] in {seconds:.0f} s: all {STEPS} steps finished, {again or 'none'} of them twice, "
            f"down for {self._incident['recovery_seconds']:.2f} s, nobody had to do anything."
        )


def _steps(count: int | None) -> str:
    return "an unknown number of steps" if count is None else f"{count} step{'' if count == 1 else 's'}"
