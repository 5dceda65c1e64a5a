"""KeepStep on two local nodes: the same script as torchrun's, or the script with the API."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api.client import Client, ref_path
from systems.system import SCRIPTS, START_LIMIT_S, Job, Service, environment, program, wait_for

KEEPSTEP = ("-m", "api.cli")
QUIET_S = 31.0  # equal failures of a script that reports no steps, sooner than 30 s one after the other, wait longer with each


class KeepStep:
    def __init__(self, api: bool) -> None:
        self.script, self.rest_s = ("four_lines.py", 0.0) if api else ("plain.py", QUIET_S)
        self.name = "KeepStep, with the API" if api else "KeepStep, torchrun's script"

    @contextmanager
    def up(self, folder: Path) -> Iterator[Service]:
        with (folder / "output").open("w") as output:
            command = [*KEEPSTEP, "up", "--nodes", "2", "--port", "0", "--state-dir", str(folder)]
            with program(*command, env=environment(), output=output):
                try:
                    record = folder / "server.json"
                    wait_for(record.exists, START_LIMIT_S, "keepstep up")
                    client = Client(json.loads(record.read_text())["address"], (folder / "token").read_text().strip())
                    yield _Server(client, folder, self.script, self.rest_s)
                    client.close()
                finally:
                    _keepstep("down", "--state-dir", str(folder))


class _Server:
    def __init__(self, client: Client, state_dir: Path, script: str, rest_s: float) -> None:
        self._client, self._state_dir, self._script, self._rest_s = client, state_dir, script, rest_s

    @contextmanager
    def submit(self, folder: Path, ranks: int) -> Iterator[Job]:
        spec = folder / "job.json"
        spec.write_text(json.dumps(self._spec(folder, ranks)))
        at = time.time()
        job = _keepstep("submit", "-d", "-f", str(spec), "--state-dir", str(self._state_dir)).strip()
        path = ref_path(job)
        try:
            yield Job(folder, ranks, at, lambda: list(self._client.every(ref_path(job, "incidents"))), self._rest_s)
        finally:
            if (ended := self._client.get(path))["state"] == "FAILED":
                raise RuntimeError(f"the job failed: {ended['message']}")
            self._client.post(f"{path}/cancel", {"grace_s": 0})
            wait_for(lambda: self._client.get(path)["state"] == "CANCELLED", START_LIMIT_S, "the end of the job")

    def _spec(self, folder: Path, ranks: int) -> dict[str, Any]:
        return {
            "name": folder.name,
            "framework": "pytorch",
            "command": ["python", self._script],
            "working_dir": str(SCRIPTS),
            "env": {"OMP_NUM_THREADS": "1", "BENCH_FOLDER": str(folder)},
            "resources": {"nodes": 2, "processes_per_node": ranks // 2, "memory_gb": 1},
            "checkpoint": {"every_steps": 500, "snapshot_every_steps": 1},
            "restart": {"max_infrastructure": 100},
        }


def _keepstep(*command: str) -> str:
    """What the command line printed."""
    return subprocess.run([sys.executable, *KEEPSTEP, *command], env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout
