"""Several real servers on one PostgreSQL database and one Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.adapters.ray import daemon
from orchestrator.adapters.ray.session import ray_environment
from tests.store.conftest import PostgresServer

pytestmark = pytest.mark.cluster
TOKEN = "a-token-that-all-servers-share"
COUNTS = "import time\nfor n in range(10**6): print(n, flush=True); time.sleep(0.05)"


class Server:
    """``keepstep up`` with a state folder of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "api.cli", "up", "--port", "0", "--json", "--state-dir", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.http = httpx.Client(
            base_url=json.loads(line)["address"], headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=20
        )

    def leads(self) -> bool:
        return "keepstep_reconciler_leads 1.0" in self.http.get("/metrics").text

    def state(self, job_id: str) -> str:
        return str(self.http.get(f"/api/v1/jobs/{job_id}").json()["state"])

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.communicate(timeout=40)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    folder = Path(tempfile.mkdtemp(prefix="ks-pg-", dir="/tmp"))
    folder.chmod(0o755)
    postgres = PostgresServer(folder / "data")
    cluster = daemon.start(tmp_path / "cluster", nodes=1)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KEEPSTEP_", "RAY_"))}
    yield own | {
        "KEEPSTEP_DATABASE_URL": postgres.new_database(), "KEEPSTEP_RAY_ADDRESS": cluster.address, "KEEPSTEP_TOKEN": TOKEN,
        "KEEPSTEP_STORAGE": str(tmp_path / "storage"), "OMP_NUM_THREADS": "1", **ray_environment(cluster.token),
    }  # fmt: skip
    daemon.stop(tmp_path / "cluster")
    postgres.remove()
    folder.rmdir()


def wait_for(check: Callable[[], Any], limit_s: float = 60.0) -> float:
    """Seconds until ``check`` was true."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < limit_s
        time.sleep(0.05)
    return time.monotonic() - began


def test_another_server_leads_when_one_sleeps_and_the_one_that_wakes_does_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    first = Server(tmp_path / "first", environment)
    wait_for(first.leads)
    second = Server(tmp_path / "second", environment)
    try:
        assert not second.leads()
        assert second.http.get("/readyz").status_code == 200
        spec = {"name": "counts", "framework": "plain", "command": ["python", "-c", COUNTS]}
        job_id = second.http.post("/api/v1/jobs", json=spec).raise_for_status().json()["id"]
        wait_for(lambda: second.state(job_id) == "RUNNING")

        first.process.send_signal(signal.SIGSTOP)
        wait_for(second.leads, 20)
        first.process.send_signal(signal.SIGCONT)
        wait_for(lambda: "keepstep_leases_lost_total 1.0" in first.http.get("/metrics").text)
        assert not first.leads()
        job = second.http.get(f"/api/v1/jobs/{job_id}").json()
        assert (job["state"], job["attempt"], job["restarts"]) == ("RUNNING", 1, 0)

        second.process.kill()
        second.process.communicate()
        wait_for(first.leads, 20)
        first.http.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
        wait_for(lambda: first.state(job_id) == "CANCELLED")

        elsewhere = subprocess.run(
            [sys.executable, "-m", "api.cli", "up", "--port", "0", "--state-dir", str(tmp_path / "third")],
            capture_output=True, text=True, timeout=60, check=False,
            env={name: value for name, value in environment.items() if name != "KEEPSTEP_RAY_ADDRESS"},
        )  # fmt: skip
        assert (elsewhere.returncode, "its jobs run in the cluster" in elsewhere.stderr) == (2, True)
    finally:
        for server in (first, second):
            server.end()
