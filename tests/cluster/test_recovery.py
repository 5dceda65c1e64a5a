"""A real training job and real kills: it always ends SUCCEEDED, no step is missing, and the record says what happened."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise

import pytest

from tests.cluster.conftest import Job, Server, kill, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def assert_no_gap(job: Job, last: int) -> None:
    """Every rank made every step; one may be there twice where it was done again."""
    for rank in (0, 1):
        steps = job.noted(rank)
        assert set(steps) == set(range(1, last + 1))
        assert all(b - a == 1 or b <= a for a, b in pairwise(steps))


def test_training_outlives_rank_agent_coordinator_all_of_these_and_server(server: Server) -> None:
    job = server.training(checkpoint={"every_steps": 50})
    job.wait_step(20)
    killed_at = kill(job.pid(1))
    incident = job.recovered(1)
    assert (incident["cause"], incident["signal"], incident["blamed_rank"], incident["class"]) == ("signal", 9, 1, "infrastructure")
    assert incident["restored_from"] == "memory"
    assert incident["lost_steps"] in (0, 1)
    assert incident["resumed_step"] == incident["last_step"] - incident["lost_steps"]
    assert set(incident["phases_ms"]) == {"detect", "stop", "launch", "restore", "first_step"}
    assert sum(incident["phases_ms"].values()) == pytest.approx(incident["recovery_seconds"] * 1000, abs=5)
    assert incident["blamed_node"] in {n["id"] for n in server.get("/nodes")["items"]}
    assert killed_at - 0.01 <= os.path.getmtime(job.home / "logs/a1/g1")

    kill(job.actors("Agent")[0])
    assert job.recovered(2)["cause"] == "agent_lost"

    kill(job.actors("Coordinator")[0])
    wait_for("the coordinator's return", lambda: "CoordinatorRestarted" in job.reasons())
    assert job.get()["generation"] == 2, "the coordinator's death must not touch the ranks"

    for pid in (*job.actors("Coordinator"), *job.actors("Agent")):
        kill(pid)
    incident = job.recovered(3)
    assert (incident["cause"], incident["restored_from"]) == ("agent_lost", "memory")
    assert job.reasons().count("CoordinatorRestarted") == 2

    server.kill()
    server.up()
    job.wait_step(job.get()["step"] + 5)
    job.let_finish()
    ended = job.wait()
    assert (ended["state"], ended["reason"], ended["attempt"]) == ("SUCCEEDED", "Completed", 1)
    assert ended["generation"] == 3, "the server's death must not touch the ranks"
    assert_no_gap(job, ended["step"])
    job.assert_nothing_left()


def test_a_plain_script_with_four_ranks_killed_twice_ends_right(server: Server) -> None:
    job = server.script("toy", resources={"nodes": 2}, env={"STEPS": "100"}, checkpoint={})
    for generation, rank in ((0, 3), (1, 0)):
        wait_for("some steps", lambda g=generation: f"step={20 + 30 * g} " in job.log(0))
        kill(job.pid(rank))
        wait_for("the next generation", lambda g=generation: "step=" in job.log(0, g + 1))
    assert job.wait()["state"] == "SUCCEEDED"
    for rank in range(4):
        assert set(job.steps(rank)) == set(range(1, 101))
        assert "finished" in job.log(rank)
    assert [i["blamed_rank"] for i in job.items("incidents")] == [3, 0]
    job.assert_nothing_left()


def test_keras_goes_on_at_the_next_batch_with_the_weights_of_the_unbroken_run(server: Server) -> None:
    spec = {"framework": "tensorflow", "strategy": "mirrored", "checkpoint": {"every_steps": 40, "snapshot_every_steps": 1}}
    resources = {"nodes": 1, "devices_per_node": 2}
    command = ["python", "train.py", "--epochs", "3"]
    whole = server.example("digits", command, resources=resources, **spec)
    broken = server.example("digits", command, resources=resources, **spec)
    pid = broken.pid(0)
    wait_for("the middle of the second epoch of 29 steps", lambda: 32 <= max(broken.steps(0), default=0) <= 50, 90)
    kill(pid)
    assert (whole.wait(120)["state"], broken.wait(120)["state"]) == ("SUCCEEDED", "SUCCEEDED")
    (incident,) = broken.items("incidents")
    assert incident["resumed_step"] % 29 != 0
    assert incident["lost_steps"] in (0, 1)
    weights = [re.findall(r"^weights=(\w+)", job.log(0), re.M) for job in (whole, broken)]
    assert weights[0] == weights[1]
    assert len(weights[0]) == 1


INFRASTRUCTURE, KILLED = "infrastructure", int(signal.SIGKILL)


def test_drills_inject_real_faults_and_the_job_recovers(server: Server) -> None:
    job = server.training(timeouts={"hang_s": 3})
    expected = {
        "kill": ("signal", KILLED, None, 1, INFRASTRUCTURE),
        "stop": ("hang", None, None, 1, INFRASTRUCTURE),
        "hang": ("hang", None, None, 1, INFRASTRUCTURE),
        "oom": ("oom_killed", KILLED, None, 1, "out_of_memory"),
        "exit": ("exit_code", None, 35, 1, INFRASTRUCTURE),
        "agent": ("agent_lost", None, None, None, INFRASTRUCTURE),
    }
    for count, fault in enumerate(expected, 1):
        job.wait_step((job.get()["step"] or 0) + 5)
        answer = server.post(f"/jobs/{job.id}/drills", {"fault": fault, "rank": 1})
        assert answer.status_code == 200, answer.text
        if "MemoryError instead" in answer.text:  # no small cgroup can be made here
            expected[fault] = ("exception", None, 1, 1, "out_of_memory")
        incident = job.recovered(count)
        told = tuple(incident[name] for name in ("cause", "signal", "exit_code", "blamed_rank", "class"))
        assert (told, incident["drill"]) == (expected[fault], fault)
    job.let_finish()
    ended = job.wait()
    assert (ended["state"], ended["attempt"], ended["generation"]) == ("SUCCEEDED", 1, len(expected))
    assert_no_gap(job, ended["step"])
