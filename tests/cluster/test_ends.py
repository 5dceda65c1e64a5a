"""However a job ends, nothing of it is left: no process, actor, placement group or shared memory; and its logs are whole."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import SCRIPTS, Job, Server, kill, wait_for
from workers.logs import PART_BYTES

ONE_NODE = {"nodes": 1, "processes_per_node": 2}
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
    job = server.toy("0:3:orphan", env={"STEPS": "100000"}, timeouts={"grace_s": 2})
    wait_for("some steps", lambda: "step=8 " in job.log(0))
    assert {server.post(f"/jobs/{job.id}/cancel").status_code for _ in range(3)} <= {200, 202}
    ended = job.wait(30)
    assert (ended["state"], ended["reason"]) == ("CANCELLED", "Cancelled")
    assert_all_free(server, job)
    assert server.post(f"/jobs/{job.id}/cancel").json()["state"] == "CANCELLED"


def test_a_rank_that_ignores_sigterm_is_ended_after_the_grace(server: Server) -> None:
    script = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(1000)\n"
    job = server.submit({"train.py": script}, framework="plain", timeouts={"grace_s": 1}, checkpoint={})
    wait_for("it is deaf", lambda: "deaf" in job.log(1))
    asked = time.monotonic()
    server.post(f"/jobs/{job.id}/cancel")
    assert job.wait(20)["state"] == "CANCELLED"
    assert time.monotonic() - asked >= 1.0
    assert_all_free(server, job)


@pytest.mark.parametrize("end", ["normal", "rank", "agent"])
def test_daemons_and_helpers_end_with_their_job(server: Server, end: str) -> None:
    job = server.toy("0:3:orphan:once", env={"STEPS": "150"})
    wait_for("some steps", lambda: "step=8 " in job.log(0))
    daemons = wait_for("the daemon runs", lambda: [p for p in job.processes() if b"sleep" in Path(f"/proc/{p}/cmdline").read_bytes()])
    if end == "rank":
        kill(job.pid(0))
    if end == "agent":
        kill(job.actors("Agent")[0])
    if end != "normal":
        wait_for("the daemons are gone", lambda: not any(Path(f"/proc/{p}").exists() for p in daemons), 10)
    assert job.wait()["state"] == "SUCCEEDED"
    assert_all_free(server, job)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_cancel_during_a_recovery(server: Server, delay: float) -> None:
    job = server.toy(env={"STEPS": "100000"}, timeouts={"grace_s": 1})
    wait_for("some steps", lambda: "step=8 " in job.log(0))
    kill(job.pid(1))
    time.sleep(delay)
    assert server.post(f"/jobs/{job.id}/cancel").status_code in (200, 202)
    assert job.wait(30)["state"] == "CANCELLED"
    assert_all_free(server, job)


def test_many_short_children_leave_no_zombie_and_death_is_seen_at_once(server: Server) -> None:
    script = """
import os, subprocess, time
for _ in range(100):
    subprocess.Popen(["true"])
    if os.fork() == 0:
        os._exit(0)
print("forked", flush=True)
time.sleep(1000 if os.environ["KEEPSTEP_GENERATION"] == "0" else 0)
"""
    job = server.submit({"train.py": script}, framework="plain", resources={"nodes": 1}, checkpoint={})
    wait_for("the children were made", lambda: "forked" in job.log(0))
    killed = kill(job.pid(0))
    wait_for("the next generation", lambda: "forked" in job.log(0, 1))
    assert os.path.getmtime(job.home / "logs/a1/g1") - killed < 2
    assert job.wait()["state"] == "SUCCEEDED"
    assert zombies() == []


def test_every_generation_has_a_store_of_its_own(server: Server) -> None:
    script = """
import os, time
print("env", *(f"{k}={os.environ.get(k)}" for k in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID",
      "MASTER_PORT", "KEEPSTEP_GENERATION", "KEEPSTEP_ATTEMPT")), flush=True)
import torch, torch.distributed as dist
if os.environ["RANK"] == str(int(os.environ["KEEPSTEP_GENERATION"]) % 2):
    time.sleep(1)  # one rank is late each time
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), flush=True)
if int(os.environ["KEEPSTEP_GENERATION"]) < 4:
    time.sleep(1000)
"""
    job = server.submit({"train.py": script}, checkpoint={})
    for generation in range(4):
        wait_for(f"generation {generation} meets", lambda g=generation: "sum 2.0" in job.log(0, g) and "sum 2.0" in job.log(1, g))
        kill(job.pid(generation % 2))
    assert job.wait()["state"] == "SUCCEEDED"
    ports = set()
    for generation in range(5):
        said = [next(line for line in job.log(rank, generation).splitlines() if line.startswith("env ")) for rank in (0, 1)]
        assert said[0] == said[1]
        values = dict(item.split("=") for item in said[0].split()[1:])
        assert values["TORCHELASTIC_RESTART_COUNT"] == values["KEEPSTEP_GENERATION"] == str(generation)
        assert (values["TORCHELASTIC_USE_AGENT_STORE"], values["TORCHELASTIC_RUN_ID"]) == ("True", job.id)
        ports.add(values["MASTER_PORT"])
    assert len(ports) == 5


def test_one_plain_process_gets_no_rank_and_no_store(server: Server) -> None:
    script = (
        "import os\nprint(sorted(k for k in os.environ if k in ('RANK', 'WORLD_SIZE', 'MASTER_PORT') or k.startswith('TORCHELASTIC')))\n"
    )
    job = server.submit({"train.py": script}, framework="plain", resources={"nodes": 1}, checkpoint={})
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.log(0).strip() == "[]"


def test_a_flood_harms_neither_training_nor_the_disk(server: Server) -> None:
    job = server.toy("1:5:noise", env={"STEPS": "60"})
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.items("incidents") == []
    assert set(job.steps(0)) == set(range(1, 61))
    newest, older = job.home / "logs/a1/g0/rank-1.log", job.home / "logs/a1/g0/rank-1.log.1"
    assert newest.stat().st_size + older.stat().st_size <= 2 * PART_BYTES + 100
    with newest.open("rb") as file:
        assert re.match(rb"\[keepstep: \d+ bytes dropped here\]\n", file.readline())
    shown = server.http.get(f"/api/v1/jobs/{job.id}/logs", params={"rank": 1, "tail": 20}).text
    assert "step=60 " in shown


def test_binary_bytes_are_stored_raw_and_nothing_after_them_is_lost(server: Server) -> None:
    job = server.toy("1:5:binary", env={"STEPS": "10"})
    assert job.wait()["state"] == "SUCCEEDED"
    raw = (job.home / "logs/a1/g0/rank-1.log").read_bytes()
    assert bytes(range(256)) * 4096 + "🚀\nafter the bytes\n".encode() in raw
    shown = server.http.get(f"/api/v1/jobs/{job.id}/logs", params={"rank": 1, "tail": 20}).text
    assert "after the bytes" in shown
    assert "step=10 " in shown


def test_a_script_keeps_what_it_writes_by_relative_path(server: Server) -> None:
    script = """
import os, pathlib, time
file = pathlib.Path("notes.txt")
print("found", file.read_text() if file.exists() else "nothing", flush=True)
file.write_text("from generation " + os.environ["KEEPSTEP_GENERATION"])
time.sleep(1000 if os.environ["KEEPSTEP_GENERATION"] == "0" else 0)
"""
    job = server.submit({"train.py": script}, framework="plain", resources={"nodes": 1}, checkpoint={})
    wait_for("it wrote", lambda: (job.home / "work/notes.txt").exists())
    kill(job.pid(0))
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.log(0) == "found nothing\nfound from generation 0\n"


def kill_and_restart(server: Server, pause: float) -> None:
    server.kill()
    time.sleep(pause)
    server.up()


@pytest.mark.parametrize("state", ["PENDING", "STARTING", "RUNNING", "CANCELLING", "ended meanwhile"])
def test_the_server_is_killed_in_every_state(server: Server, state: str) -> None:
    long = {"STEPS": "100000"}
    if state == "PENDING":
        blocker = server.toy(env=long, resources={"nodes": 2, "processes_per_node": 1, "cpus_per_node": 2}, timeouts={"grace_s": 1})
        blocker.wait_state("RUNNING")
        job = server.toy(env={"STEPS": "20"})
        wait_for("it waits for room", lambda: job.get()["reason"] == "WaitingForRoom")
        kill_and_restart(server, 0.5)
        assert (job.get()["state"], blocker.get()["state"]) == ("PENDING", "RUNNING")
        server.post(f"/jobs/{blocker.id}/cancel")
        assert blocker.wait()["state"] == "CANCELLED"
    elif state == "STARTING":
        job = server.toy(env={"STEPS": "20"})
        job.wait_state("STARTING")
        kill_and_restart(server, 0.5)
    elif state == "RUNNING":
        job = server.toy(env={"STEPS": "400"})
        wait_for("some steps", lambda: "step=8 " in job.log(0))
        kill_and_restart(server, 0.5)
    elif state == "CANCELLING":
        script = (
            (SCRIPTS / "toy.py").read_text().replace("import os\n", "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n", 1)
        )
        job = server.submit({"train.py": script}, env=long, timeouts={"grace_s": 6}, resources=ONE_NODE)
        wait_for("some steps", lambda: "step=8 " in job.log(0))
        server.post(f"/jobs/{job.id}/cancel")
        job.wait_state("CANCELLING")
        kill_and_restart(server, 0.5)
        assert job.wait()["state"] == "CANCELLED"
        assert_all_free(server, job)
        return
    else:
        job = server.toy(env={"STEPS": "60"})
        wait_for("some steps", lambda: "step=8 " in job.log(0))
        server.kill()
        wait_for("the script has ended", lambda: "finished" in job.log(0) and "finished" in job.log(1))
        ended_at = time.time()
        time.sleep(2)
        server.up()
        job.wait()
        ranks = job.items("ranks")
        assert [r["exit_code"] for r in ranks] == [0, 0]
        from datetime import datetime

        assert abs(datetime.fromisoformat(job.get()["ended_at"]).timestamp() - ended_at) < 2
    ended = job.wait()
    assert (ended["state"], ended["attempt"], ended["generation"], ended["restarts"]) == ("SUCCEEDED", 1, 0, 0)
    assert job.log(0).count("finished") == 1, "no double run"
    assert_all_free(server, job)
