"""However a job ends, nothing of it is left: no process, actor, placement group or shared memory; and its logs are whole."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Job, Server, kill, wait_for
from workers.log_parts import PART_BYTES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def assert_all_free(server: Server, job: Job) -> None:
    job.assert_nothing_left()
    assert not job.actors("Agent")
    wait_for("the coordinator is gone", lambda: not job.actors("Coordinator"), 3)  # Ray ends it a moment after it is asked to
    wait_for("Ray has all its resources back", lambda: all(n["free_cpus"] == n["cpus"] for n in server.get("/nodes")["items"]), 15)


def zombies() -> list[str]:
    """Ended processes below our agents and launchers that nobody has collected."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                command = (Path("/proc") / parent / "cmdline").read_bytes()
            except OSError:
                continue
            if state == "Z" and (command.startswith(b"ray::Agent") or b"workers.launcher" in command):
                found.append(folder.name)
    return found


def test_cancel_leaves_nothing_and_is_idempotent(server: Server) -> None:
    job = server.counting("0:3:orphan", timeouts={"grace_s": 2})
    wait_for("some steps", lambda: "step=8 " in job.log(0))
    assert {server.post(f"/jobs/{job.id}/cancel").status_code for _ in range(3)} <= {200, 202}
    ended = job.wait(30)
    assert (ended["state"], ended["reason"]) == ("CANCELLED", "Cancelled")
    assert_all_free(server, job)
    assert server.post(f"/jobs/{job.id}/cancel").json()["state"] == "CANCELLED"


def test_a_rank_that_ignores_sigterm_is_ended_after_the_grace(server: Server) -> None:
    job = server.counting(env={"DEAF": "1"}, timeouts={"grace_s": 1}, resources={"nodes": 2, "processes_per_node": 1})
    wait_for("it is deaf", lambda: "step=1 " in job.log(1))
    asked = time.monotonic()
    server.post(f"/jobs/{job.id}/cancel")
    assert job.wait(20)["state"] == "CANCELLED"
    assert time.monotonic() - asked >= 1.0
    assert_all_free(server, job)


def test_daemons_and_helpers_end_with_their_rank_their_agent_and_their_job(server: Server) -> None:
    hidden = f"{os.getpid()}.{time.monotonic_ns()}"  # its environment is empty, so it is known by what it is told
    job = server.counting("0:3:orphan", env={"HIDDEN": hidden})
    for end in ("rank", "launcher", "agent", "job"):
        wait_for("the hidden daemon runs", lambda: started(hidden))
        sleeps = wait_for("the daemon runs", lambda: [p for p in job.processes() if b"sleep" in Path(f"/proc/{p}/cmdline").read_bytes()])
        sleeps += started(hidden)
        match end:
            case "launcher":
                kill(psutil.Process(job.pid(0)).ppid())
            case "rank":
                kill(job.pid(0))
            case "agent":
                kill(job.actors("Agent")[0])
            case "job":
                job.let_finish()
        wait_for("the daemons are gone", lambda pids=sleeps: not any(Path(f"/proc/{p}").exists() for p in pids))
    ended = job.wait()
    assert (ended["state"], ended["generation"]) == ("SUCCEEDED", 3)
    assert_all_free(server, job)


def started(hidden: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", hidden]]


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_cancel_during_a_recovery(server: Server, delay: float) -> None:
    job = server.counting(timeouts={"grace_s": 1})
    wait_for("some steps", lambda: "step=8 " in job.log(0))
    kill(job.pid(1))
    time.sleep(delay)
    assert server.post(f"/jobs/{job.id}/cancel").status_code in (200, 202)
    assert job.wait(30)["state"] == "CANCELLED"
    assert_all_free(server, job)


LONELY = """
import os, pathlib, subprocess, time

print(sorted(k for k in os.environ if k in ("RANK", "WORLD_SIZE", "MASTER_PORT") or k.startswith("TORCHELASTIC")))
notes = pathlib.Path("notes.txt")
print("found", notes.read_text() if notes.exists() else "nothing")
notes.write_text("from generation " + os.environ["KEEPSTEP_GENERATION"])
if os.environ["KEEPSTEP_GENERATION"] == "0":
    for _ in range(100):
        subprocess.Popen(["true"])
        if os.fork() == 0:
            os._exit(0)
print("up", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.02)
"""


def test_one_plain_process_has_no_rank_finds_its_files_again_and_leaves_no_zombies(server: Server) -> None:
    job = server.submit({"train.py": LONELY}, framework="plain", resources={"nodes": 1}, checkpoint={})
    wait_for("its children were made", lambda: "up" in job.log(0))
    kill(job.pid(0))
    wait_for("the next generation", lambda: "up" in job.log(0, 1))
    wait_for("no zombie is left", lambda: not zombies())
    job.let_finish()
    assert job.wait()["state"] == "SUCCEEDED"
    assert (job.log(0, 0), job.log(0, 1)) == ("[]\nfound nothing\nup\n", "[]\nfound from generation 0\nup\n")
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["signal"]) == ("signal", 9)


def test_every_generation_has_a_store_of_its_own(server: Server) -> None:
    script = """
import os, time
print("env", *(f"{k}={os.environ.get(k)}" for k in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID",
      "MASTER_PORT", "KEEPSTEP_GENERATION", "KEEPSTEP_ATTEMPT")), flush=True)
import torch, torch.distributed as dist
if os.environ["RANK"] == str(int(os.environ["KEEPSTEP_GENERATION"]) % 2):
    time.sleep(0.5)  # one rank is late each time
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), flush=True)
if int(os.environ["KEEPSTEP_GENERATION"]) < 3:
    time.sleep(1000)
"""
    job = server.submit({"train.py": script}, checkpoint={})
    for generation in range(3):
        wait_for(f"generation {generation} meets", lambda g=generation: "sum 2.0" in job.log(0, g) and "sum 2.0" in job.log(1, g))
        kill(job.pid(generation % 2))
    assert job.wait()["state"] == "SUCCEEDED"
    ports = set()
    for generation in range(4):
        said = [next(line for line in job.log(rank, generation).splitlines() if line.startswith("env ")) for rank in (0, 1)]
        assert said[0] == said[1]
        values = dict(item.split("=") for item in said[0].split()[1:])
        assert values["TORCHELASTIC_RESTART_COUNT"] == values["KEEPSTEP_GENERATION"] == str(generation)
        assert (values["TORCHELASTIC_USE_AGENT_STORE"], values["TORCHELASTIC_RUN_ID"]) == ("True", job.id)
        ports.add(values["MASTER_PORT"])
    assert len(ports) == 4


def test_a_flood_and_binary_bytes_harm_neither_ranks_nor_disk_nor_what_follows(server: Server) -> None:
    job = server.counting("1:5:flood,0:5:binary")
    wait_for("rank 1 goes on after its flood", lambda: "step=9 " in server.log_tail(job, 1))
    job.let_finish()
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.items("incidents") == []
    newest, older = job.home / "logs/a1/g0/rank-1.log", job.home / "logs/a1/g0/rank-1.log.1"
    assert newest.stat().st_size + older.stat().st_size <= 2 * PART_BYTES + 100
    with newest.open("rb") as file:
        assert re.match(rb"\[keepstep: \d+ bytes dropped here\]\n", file.readline())
    assert "finished" in server.log_tail(job, 1)
    raw = (job.home / "logs/a1/g0/rank-0.log").read_bytes()
    assert bytes(range(256)) * 4096 + "🚀\nafter the bytes\n".encode() in raw
    assert raw.endswith(b"finished\n")
    assert "finished" in server.log_tail(job, 0)


def kill_and_restart(server: Server) -> None:
    server.kill()
    time.sleep(0.5)
    server.up()


def assert_undisturbed(job: Job) -> None:
    ended = job.wait()
    assert (ended["state"], ended["attempt"], ended["generation"], ended["restarts"]) == ("SUCCEEDED", 1, 0, 0)
    assert job.log(0).count("finished") == 1, "no double run"


def test_the_server_is_killed_while_a_job_runs_and_one_waits(server: Server) -> None:
    runs = server.counting(resources={"nodes": 2, "processes_per_node": 1, "cpus_per_node": 2})
    runs.wait_state("RUNNING")
    waits = server.counting()
    wait_for("it waits for room", lambda: waits.get()["reason"] == "WaitingForRoom")
    kill_and_restart(server)
    assert (runs.get()["state"], waits.get()["state"]) == ("RUNNING", "PENDING")
    for job in (runs, waits):
        job.wait_state("RUNNING")
        job.let_finish()
        assert_undisturbed(job)
    assert_all_free(server, waits)


def test_the_server_is_killed_while_a_job_starts_and_one_is_cancelled(server: Server) -> None:
    ends = server.counting(env={"DEAF": "1"}, timeouts={"grace_s": 4})
    wait_for("some steps", lambda: "step=8 " in ends.log(0))
    server.post(f"/jobs/{ends.id}/cancel")
    ends.wait_state("CANCELLING")
    starts = server.counting()
    starts.wait_state("STARTING")
    kill_and_restart(server)
    starts.wait_state("RUNNING")
    starts.let_finish()
    assert_undisturbed(starts)
    assert ends.wait()["state"] == "CANCELLED"
    assert_all_free(server, ends)


def test_a_job_that_ends_while_the_server_is_dead_ended_then(server: Server) -> None:
    job = server.counting()
    wait_for("some steps", lambda: "step=8 " in job.log(0))
    pids = [job.pid(0), job.pid(1)]
    killed_at = time.time()
    server.kill()
    job.let_finish()
    wait_for("the ranks have ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    up_at = time.time()
    server.up()
    assert_undisturbed(job)
    assert [r["exit_code"] for r in job.items("ranks")] == [0, 0]
    assert killed_at < datetime.fromisoformat(job.get()["ended_at"]).timestamp() < up_at
    assert_all_free(server, job)
