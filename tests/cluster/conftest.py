"""A real server with two local Ray nodes for the end-to-end tests, and small scripts as jobs."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from workers.processes import SHM

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 120  # of the training that `shakespeare` starts
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
KEEPSTEP = str(Path(sys.executable).with_name("keepstep"))


def wait_for(what: str, check: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """The first true answer of ``check``."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        answer = check()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {limit_s:.0f} s: {what}; last answer {answer!r}")


class Server:
    """``keepstep up`` as a process of its own, and its REST interface."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client()

    def up(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "RAY_"))}
        (self.state_dir / "server.json").unlink(missing_ok=True)
        log = (self.state_dir / "up.log").open("ab")
        self.process = subprocess.Popen(
            [KEEPSTEP, "up", "--nodes", "2", "--port", "0", "--state-dir", str(self.state_dir)], stdout=log, stderr=log, env=env
        )
        wait_for("the server answers", self._answers, 90)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.state_dir / "up.log").read_text()
        try:
            address = json.loads((self.state_dir / "server.json").read_text())["address"]
            self.http.close()
            token = (self.state_dir / "token").read_text().strip()
            self.http = httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}, timeout=30)
            return self.http.get("/readyz").status_code == 200
        except (OSError, ValueError, httpx.HTTPError):
            return False

    def kill(self) -> None:
        """SIGKILL to the server; jobs go on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def down(self) -> None:
        self.http.close()
        done = subprocess.run(
            [KEEPSTEP, "down", "--state-dir", str(self.state_dir)], capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if self.process is not None:
            self.process.wait(20)

    def get(self, path: str, **params: Any) -> Any:
        response = self.http.get(f"/api/v1{path}", params=params)
        response.raise_for_status()
        return response.json()

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(f"/api/v1{path}", json=body)

    def log_tail(self, job: Job, rank: int) -> str:
        """As the server shows it."""
        response = self.http.get(f"/api/v1/jobs/{job.id}/logs", params={"rank": rank, "tail": 20})
        return response.raise_for_status().text

    def bundle(self, files: dict[str, bytes]) -> str:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        digest = sha256(packed.getvalue()).hexdigest()
        self.http.put(f"/api/v1/bundles/{digest}", content=packed.getvalue()).raise_for_status()
        return digest

    def submit(self, files: dict[str, str], **spec: Any) -> Job:
        """A job of the given files; ``spec`` overrides the default of two plain ranks in two nodes."""
        resources = {"nodes": 2, "processes_per_node": 1, "cpus_per_node": 1, "memory_gb": 1} | spec.pop("resources", {})
        body = {
            "name": "test",
            "framework": "pytorch",
            "command": ["python", "train.py"],
            "bundle": self.bundle({name: text.encode() for name, text in files.items()}),
            "resources": resources,
            "checkpoint": {"every_steps": 20},
        } | spec
        response = self.post("/jobs", body)
        assert response.status_code == 201, response.text
        return Job(self, response.json()["id"])

    def script(self, name: str, fault: str = "", **spec: Any) -> Job:
        """One of ``scripts``: two ranks on one node, so that one launcher is enough, unless told otherwise."""
        env = {"FAULT": fault, "OMP_NUM_THREADS": "1"} | spec.pop("env", {})
        resources = {"nodes": 1, "processes_per_node": 2} | spec.pop("resources", {})
        return self.submit({"train.py": (SCRIPTS / f"{name}.py").read_text()}, env=env, resources=resources, **spec)

    def counting(self, fault: str = "", **spec: Any) -> Job:
        return self.script("counts", fault, framework="plain", checkpoint={}, **spec)

    def training(self, **spec: Any) -> Job:
        """One rank on each of two nodes; a snapshot after every step."""
        checkpoint = {"snapshot_every_steps": 1} | spec.pop("checkpoint", {})
        resources = {"nodes": 2, "processes_per_node": 1} | spec.pop("resources", {})
        return self.script("trains", checkpoint=checkpoint, resources=resources, **spec)

    def example(self, name: str, command: list[str], **spec: Any) -> Job:
        folder = EXAMPLES / name
        files = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.suffix in (".py", ".txt")}
        return self.submit(files, command=command, env={"OMP_NUM_THREADS": "1"}, name=name, **spec)


class Job:
    """A submitted job."""

    def __init__(self, server: Server, job_id: str) -> None:
        self.server, self.id = server, job_id
        self.home = server.state_dir / "storage" / "jobs" / job_id

    def get(self) -> dict[str, Any]:
        return self.server.get(f"/jobs/{self.id}")

    def items(self, what: str) -> list[dict[str, Any]]:
        """All of a list, oldest first."""
        items = self.server.get(f"/jobs/{self.id}/{what}", limit=200)["items"]
        return sorted(items, key=lambda i: i.get("generation") or 0) if what == "incidents" else items

    def reasons(self) -> list[str]:
        return [e["reason"] for e in self.items("events")]

    def wait(self, limit_s: float = 90.0) -> dict[str, Any]:
        return wait_for(f"{self.id} is final", lambda: (job := self.get())["state"] in FINAL and job, limit_s)

    def wait_state(self, state: str, limit_s: float = 60.0) -> dict[str, Any]:
        return wait_for(f"{self.id} is {state}", lambda: (job := self.get())["state"] == state and job, limit_s)

    def wait_step(self, step: int, limit_s: float = 60.0) -> None:
        wait_for(f"{self.id} made step {step}", lambda: (self.get()["step"] or 0) >= step, limit_s)

    def let_finish(self) -> None:
        """For the scripts that go on until they are told that it is enough."""
        (self.home / "work" / "enough").touch()

    def recovered(self, count: int) -> dict[str, Any]:
        """The newest incident, once as many are behind the job."""

        def behind() -> Any:
            done = [i for i in self.items("incidents") if i["recovery_seconds"]]
            return len(done) == count and done[-1]

        return wait_for(f"recovery {count}", behind)

    def pid(self, rank: int) -> int:
        return wait_for("a pid", lambda: next((r["pid"] for r in self.items("ranks") if r["rank"] == rank and r["ended_at"] is None), None))

    def log(self, rank: int, generation: int | None = None) -> str:
        pattern = f"a*/g{'*' if generation is None else generation}/rank-{rank}.log"
        paths = sorted((self.home / "logs").glob(pattern), key=lambda p: [int(n) for n in re.findall(r"\d+", "/".join(p.parts[-3:]))])
        return "".join(p.read_bytes().decode("utf-8", "replace") for p in paths)

    def steps(self, rank: int) -> list[int]:
        return [int(n) for n in re.findall(r"^step=(\d+) ", self.log(rank), re.M)]

    def noted(self, rank: int) -> list[int]:
        """Steps that a rank of ``training`` made."""
        return [int(line) for line in (self.home / "work" / f"steps-{rank}").read_text().splitlines()]

    def processes(self) -> list[int]:
        """Living processes that carry the job's id in their environment."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if self.id.encode() in (folder / "environ").read_bytes():
                        found.append(int(folder.name))
                except OSError:
                    continue
        return found

    def assert_nothing_left(self) -> None:
        """No process and no shared memory of the job."""
        wait_for("no process is left", lambda: not self.processes(), 10)
        wait_for("no shared memory is left", lambda: not list(SHM.glob(f"**/{self.id}*")), 10)

    def actors(self, kind: str) -> list[int]:
        """Pids of Ray actors in this server's cluster: kind is Coordinator or Agent. One job runs at a time in these tests."""
        cluster = json.loads((self.server.state_dir / "cluster.json").read_text())["id"].encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if (folder / "cmdline").read_bytes().startswith(f"ray::{kind}".encode()) and cluster in (
                        folder / "environ"
                    ).read_bytes():
                        found.append(int(folder.name))
                except OSError:
                    continue
        return found


def shakespeare(server: Server, **spec: Any) -> Job:
    """The training that ends with the weights of the ``unbroken`` one, whatever happens to it."""
    command = ["python", "train.py", "--steps", str(STEPS), "--sample", "1"]
    checkpoint = {"every_steps": 40, "snapshot_every_steps": 1} | spec.pop("checkpoint", {})
    return server.example("shakespeare", command, checkpoint=checkpoint, **spec)


def weights(job: Job) -> str:
    """Of the trained network."""
    found = re.findall(r"^weights=(\w{64})$", job.log(0), re.M)
    assert len(set(found)) == 1
    return str(found[0])


@pytest.fixture(scope="session")
def unbroken(server: Server) -> str:
    """Weights of the training that nothing happened to."""
    job = shakespeare(server)
    assert job.wait(200)["state"] == "SUCCEEDED"
    assert job.items("incidents") == []
    return weights(job)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.up()
        yield server
    finally:
        server.down()


def kill(pid: int) -> float:
    """SIGKILL; returns when, in Unix seconds."""
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at
