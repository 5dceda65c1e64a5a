"""`keepstep up` and `keepstep down` as a user types them, with the real embedded Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.store import SqlStore
from orchestrator.adapters.ray import daemon
from orchestrator.core.states import JobState
from workers.processes import CLUSTER_MARK

pytestmark = pytest.mark.cluster
COMMAND = [sys.executable, "-m", "api.cli"]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    environment = own | {"KEEPSTEP_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    yield environment
    assert keepstep(environment, "down").returncode == 0


def keepstep(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=environment)


def up(environment: dict[str, str], *arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [*COMMAND, "up", "--port", "0", "--json", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return process, json.loads(line)["address"]


def marked(cluster_id: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(CLUSTER_MARK) == cluster_id:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_server_stops_and_comes_back_while_a_job_goes_on_and_down_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    spec = tmp_path / "job.json"
    code = "import time\nfor n in range(10**6): print(n, flush=True); time.sleep(0.05)"
    spec.write_text(json.dumps({"name": "counts", "framework": "plain", "command": ["python", "-c", code]}))

    first, address = up(environment)
    assert httpx.get(f"{address}/readyz", trust_env=False).status_code == 200
    assert "already uses the state folder" in keepstep(environment, "up").stderr
    job_id = keepstep(environment, "submit", "-d", "-f", str(spec)).stdout.strip()
    follow = [*COMMAND, "logs", "-f", job_id]
    follower = subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert follower.stdout is not None
    lines = [follower.stdout.readline() for _ in range(3)]

    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=30)
    assert first.returncode == 0
    assert "Jobs need no server to go on" in told
    assert "Traceback" not in told
    assert "SIG" not in told
    assert "no server runs" in keepstep(environment, "ls").stderr

    wrong = keepstep(environment, "up", "--port", "0", "--nodes", "3")
    assert (wrong.returncode, "the cluster that runs has 1" in wrong.stderr) == (2, True)
    second, _ = up(environment)
    while "120\n" not in lines:
        lines.append(follower.stdout.readline())
    assert lines == [f"{n}\n" for n in range(121)]  # every line once, over the server's restart
    job = json.loads(keepstep(environment, "get", job_id, "--json").stdout)
    assert (job["state"], job["restarts"], job["attempt"]) == ("RUNNING", 0, 1)
    follower.send_signal(signal.SIGINT)
    assert "the job is left alone" in follower.communicate(timeout=20)[1]
    assert follower.returncode == 130

    cluster = json.loads((state / "cluster.json").read_text())
    assert marked(cluster["id"])
    down = keepstep(environment, "down")
    assert down.stdout == "ended: server and cluster\n"
    assert f"{job_id} (counts) still ran" in down.stderr
    second.communicate(timeout=20)
    store = SqlStore(open_engine(f"sqlite:///{state}/keepstep.db"))
    kept = store.job(job_id)
    assert kept is not None
    assert (kept.state, kept.reason, kept.failures) == (JobState.RECOVERING, "TakenDown", ())
    store.close()
    assert marked(cluster["id"]) == []
    assert not Path(cluster["temp_dir"]).exists()
    assert not daemon.shared_memory(cluster["id"]).exists()
    assert "nothing runs" in keepstep(environment, "down").stdout


def test_taken_port_is_told_before_anything_starts(environment: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = keepstep(environment, "up", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "choose another with --port" in done.stderr
    assert not (tmp_path / "state" / "cluster.json").exists()


@pytest.mark.slow
def test_server_whose_cluster_is_gone_says_so_and_still_ends(environment: dict[str, str], tmp_path: Path) -> None:
    server, address = up(environment)
    daemon.stop(tmp_path / "state")
    nodes = keepstep(environment, "nodes")
    assert nodes.returncode == 2
    assert "ray" in nodes.stderr
    assert httpx.get(f"{address}/healthz", trust_env=False).status_code == 200
    server.send_signal(signal.SIGINT)
    assert "server stopped" in server.communicate(timeout=40)[1]
    assert server.returncode == 0
