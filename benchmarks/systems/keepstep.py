"""KeepStep on local nodes of its own: any script, with what its job says of snapshots and checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api.client import Client, ref_path
from systems.system import SCRIPTS, START_LIMIT_S, Job, Service, environment, program, wait_for

KEEPSTEP = ("-m", "api.cli")


@dataclass(frozen=True)
class KeepStep:
    """``checkpoint``, ``env``: as in a job."""

    name: str
    script: str
    checkpoint: Mapping[str, Any]
    nodes: int = 2
    env: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def up(self, folder: Path) -> Iterator[Service]:
        with (folder / "output").open("w") as output:
            command = [*KEEPSTEP, "up", "--nodes", str(self.nodes), "--port", "0", "--state-dir", str(folder)]
            with program(*command, env=environment(), output=output):
                try:
                    record = folder / "server.json"
                    wait_for(record.exists, START_LIMIT_S, "keepstep up")
                    client = Client(json.loads(record.read_text())["address"], (folder / "token").read_text().strip())
                    yield _Server(client, folder, self)
                    client.close()
                finally:
                    _keepstep("down", "--state-dir", str(folder))


class _Server:
    def __init__(self, client: Client, state_dir: Path, system: KeepStep) -> None:
        self._client, self._state_dir, self._system = client, state_dir, system

    @contextmanager
    def submit(self, folder: Path, ranks: int) -> Iterator[Job]:
        spec = folder / "job.json"
        spec.write_text(json.dumps(self._spec(folder, ranks)))
        at = time.time()
        job = _keepstep("submit", "-d", "-f", str(spec), "--state-dir", str(self._state_dir)).strip()
        path = ref_path(job)
        try:
            yield Job(folder, ranks, at, lambda: list(self._client.every(ref_path(job, "incidents"))))
        finally:
            if (ended := self._client.get(path))["state"] == "FAILED":
                raise RuntimeError(f"the job failed: {ended['message']}")
            self._client.post(f"{path}/cancel", {"grace_s": 0})
            wait_for(lambda: self._client.get(path)["state"] == "CANCELLED", START_LIMIT_S, "the end of the job")

    def _spec(self, folder: Path, ranks: int) -> dict[str, Any]:
        system = self._system
        return {
            "name": folder.name,
            "framework": "pytorch",
            "command": ["python", system.script],
            "working_dir": str(SCRIPTS),
            "env": {"OMP_NUM_THREADS": "1", "BENCH_FOLDER": str(folder), **system.env},
            "resources": {"nodes": system.nodes, "processes_per_node": ranks // system.nodes, "memory_gb": 1},
            "checkpoint": dict(system.checkpoint),
            "restart": {"max_infrastructure": 100},
        }


def _keepstep(*command: str) -> str:
    """What the command line printed."""
    return subprocess.run([sys.executable, *KEEPSTEP, *command], env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout
