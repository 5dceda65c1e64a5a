"""kill -9 of a rank to the next new step: KeepStep beside torchrun, the same script on the same machine in one run.

``python benchmarks/recovery.py [kills] [ranks]``, default 5 and 2. Times come from the ranks' own log; for the script that uses the API
they are compared with what the incidents say. Only the ratio means something on another machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

SCRIPT = Path(__file__).parent / "scripts" / "ddp.py"
BIN = Path(sys.executable).parent
PEER_LIMIT_S = 40.0  # a peer that makes no new step within this time is taken for hung
PHASES = ("detect", "stop", "launch", "restore", "first_step")


def wait_for(check: Callable[[], Any], limit_s: float = 120.0) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(0.02)
    raise TimeoutError(f"nothing came within {limit_s:.0f} s")


def steps(log: Path) -> list[tuple[float, int, int]]:
    """(Unix time, step, pid) of each line that is whole."""
    lines = log.read_text().splitlines() if log.exists() else []
    fields = [line.split() for line in lines]
    return [(float(f[0]), int(f[1]), int(f[2])) for f in fields if len(f) == 3 and f[0].startswith("1") and f[1].isdigit()]


def kill_and_measure(
    logs: Callable[[], list[tuple[float, int, int]]], pid_of_victim: Callable[[], int], limit_s: float = 120.0
) -> tuple[float, int]:
    """(seconds from the kill to the first step that is new, steps done again), as rank 0's log shows."""
    seen = len(logs())
    wait_for(lambda: len(logs()) > seen + 20)
    victim = pid_of_victim()
    at = time.time()
    os.kill(victim, signal.SIGKILL)
    last = max(step for when, step, _ in logs() if when <= at + 0.05)
    pid = logs()[-1][2]
    new = wait_for(lambda: [line for line in logs() if line[2] != pid and line[1] > last], limit_s)[0]
    first = next(line for line in logs() if line[2] == new[2])
    return new[0] - at, last + 1 - first[1]


def torchrun(folder: Path, kills: int, ranks: int) -> list[tuple[float, int]]:
    """As many kills as asked for; one that torchrun does not come back from counts as infinite, and it is started anew for the next."""
    seen: list[tuple[float, int]] = []
    while len(seen) < kills:
        home = folder / f"start-{len(seen)}"
        home.mkdir()
        with peer(home, ranks) as (logs, victim):
            try:
                while len(seen) < kills:
                    seen.append(kill_and_measure(logs, victim, PEER_LIMIT_S))
            except TimeoutError:
                seen.append((math.inf, 0))
    return seen


@contextlib.contextmanager
def peer(home: Path, ranks: int) -> Iterator[tuple[Callable[[], list[tuple[float, int, int]]], Callable[[], int]]]:
    """The script under torchrun: (rank 0's lines so far, pid of the last rank)."""
    command = [str(BIN / "torchrun"), "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", f"--nproc-per-node={ranks}"]
    # A generous budget: one recovery may cost it several restarts.
    command += ["--max-restarts=100", "--redirects=1", f"--log-dir={home}/logs", str(SCRIPT), "plain"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "SAVED": str(home / "saved.pt")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def logs(rank: int = 0) -> list[tuple[float, int, int]]:
        found = sorted((home / "logs").glob(f"**/{rank}/stdout.log"), key=lambda p: p.stat().st_mtime)
        return [line for path in found for line in steps(path)]

    try:
        yield logs, lambda: logs(ranks - 1)[-1][2]
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(state_dir: Path) -> Iterator[httpx.Client]:
    command = [str(BIN / "keepstep"), "up", "--nodes", "2", "--port", "0", "--state-dir", str(state_dir)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    record = state_dir / "server.json"
    try:
        wait_for(record.exists)
        address = json.loads(record.read_text())["address"]
        token = (state_dir / "token").read_text().strip()
        with httpx.Client(base_url=f"{address}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
            yield client
    finally:
        subprocess.run([str(BIN / "keepstep"), "down", "--state-dir", str(state_dir)], check=False, stdout=subprocess.DEVNULL)
        process.wait(30)


def keepstep(client: httpx.Client, state_dir: Path, mode: str, kills: int, ranks: int) -> tuple[list[tuple[float, int]], list[Any]]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as bundle:
        bundle.write(SCRIPT, "ddp.py")
    digest = sha256(packed.getvalue()).hexdigest()
    client.put(f"/bundles/{digest}", content=packed.getvalue()).raise_for_status()
    spec = {
        "name": f"bench-{mode}",
        "framework": "pytorch",
        "command": ["python", "ddp.py", mode],
        "bundle": digest,
        "env": {"OMP_NUM_THREADS": "1", "SAVED": str(state_dir / "saved.pt")},
        "resources": {"nodes": 2, "processes_per_node": ranks // 2, "memory_gb": 1},
        "checkpoint": {"every_steps": 500, "snapshot_every_steps": 1},
    }
    answer = client.post("/jobs", json=spec)
    answer.raise_for_status()
    job = answer.json()["id"]
    folder = state_dir / "storage" / "jobs" / job / "logs" / "a1"

    def logs() -> list[tuple[float, int, int]]:
        found = sorted(folder.glob("g*/rank-0.log"), key=lambda p: int(p.parent.name[1:]))
        return [line for path in found for line in steps(path)]

    def victim() -> int:
        pid: int = client.get(f"/jobs/{job}/ranks").json()["items"][ranks - 1]["pid"]
        return pid

    try:
        seen = []
        for n in range(kills):
            seen.append(kill_and_measure(logs, victim))
            wait_for(lambda n=n: len(recovered(client, job)) == n + 1)
        return seen, recovered(client, job)
    finally:
        client.post(f"/jobs/{job}/cancel", json={"grace_s": 0})
        wait_for(lambda: client.get(f"/jobs/{job}").json()["state"] == "CANCELLED")


def recovered(client: httpx.Client, job: str) -> list[Any]:
    return [i for i in client.get(f"/jobs/{job}/incidents").json()["items"] if i["recovery_seconds"] is not None]


def row(name: str, seen: list[tuple[float, int]]) -> str:
    times = [seconds for seconds, _ in seen]
    lost = [again for _, again in seen]
    return (
        f"{name:28} {statistics.median(times):7.3f} {min(times):7.3f} {max(times):7.3f}   {statistics.median(lost):g} (at most {max(lost)})"
    )


def main() -> None:
    kills, ranks = (int(a) for a in (sys.argv[1:] + ["5", "2"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "peer").mkdir()
        (folder / "keepstep").mkdir()
        with server(folder / "keepstep") as client:
            plain, _ = keepstep(client, folder / "keepstep", "plain", kills, ranks)
            api, incidents = keepstep(client, folder / "keepstep", "api", kills, ranks)
        peer = torchrun(folder / "peer", kills, ranks)
    print(f"kill -9 of one of {ranks} ranks to the next new step, seconds; {kills} kills each")
    print(f"{'':28} {'median':>7} {'min':>7} {'max':>7}   steps done again")
    print(row("torchrun (c10d)", peer))
    print(row("KeepStep, the same script", plain))
    print(row("KeepStep, with the API", api))
    middle = {name: statistics.median(t for t, _ in seen) for name, seen in (("peer", peer), ("plain", plain), ("api", api))}
    print(f"ratio to torchrun: the same script {middle['peer'] / middle['plain']:.1f}, with the API {middle['peer'] / middle['api']:.1f}")
    told = [i["recovery_seconds"] for i in incidents]
    apart = max(abs(a - b) for (a, _), b in zip(api, told, strict=True))
    print(f"incidents say: median {statistics.median(told):.3f}; at most {apart * 1000:.0f} ms from the ranks' log")
    phases = {p: statistics.median(i["phases_ms"].get(p, 0.0) for i in incidents) for p in PHASES}
    print("phases, median ms: " + ", ".join(f"{name} {ms:.0f}" for name, ms in phases.items()))


if __name__ == "__main__":
    main()
