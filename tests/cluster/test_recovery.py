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
    """Every step is in every rank's log; a step may be there twice where one was done again."""
    for rank in (0, 1):
        steps = job.steps(rank)
        assert set(steps) == set(range(1, last + 1))
        assert all(b - a == 1 or b <= a for a, b in pairwise(steps))


def test_training_outlives_rank_agent_coordinator_and_server(server: Server) -> None:
    job = server.example("shakespeare", ["python", "train.py", "--steps", "260"], checkpoint={"every_steps": 50, "snapshot_every_steps": 1})
    job.wait_step(20)
    killed_at = kill(job.pid(1))
    incident = wait_for("the rank's recovery", lambda: [i for i in job.items("incidents") if i["recovery_seconds"]])[0]
    assert (incident["cause"], incident["signal"], incident["blamed_rank"], incident["class"]) == ("signal", 9, 1, "infrastructure")
    assert incident["restored_from"] == "memory"
    assert incident["lost_steps"] in (0, 1)
    assert incident["resumed_step"] == incident["last_step"] - incident["lost_steps"]
    assert set(incident["phases_ms"]) == {"detect", "stop", "launch", "restore", "first_step"}
    assert sum(incident["phases_ms"].values()) == pytest.approx(incident["recovery_seconds"] * 1000, abs=5)
    assert incident["blamed_node"] in {n["id"] for n in server.get("/nodes")["items"]}
    assert killed_at - 0.01 <= os.path.getmtime(job.home / "logs/a1/g1")

    kill(job.actors("Agent")[0])
    wait_for("the agent's recovery", lambda: len([i for i in job.items("incidents") if i["recovery_seconds"]]) == 2)
    assert job.items("incidents")[1]["cause"] == "agent_lost"
    assert job.get()["attempt"] == 1

    kill(job.actors("Coordinator")[0])
    wait_for("the coordinator's return", lambda: "CoordinatorRestarted" in job.reasons())

    generation = job.get()["generation"]
    server.kill()
    server.up()
    ended = job.wait(120)
    assert (ended["state"], ended["reason"], ended["step"]) == ("SUCCEEDED", "Completed", 260)
    assert ended["generation"] == generation, "the server's death must not touch the ranks"
    assert_no_gap(job, 260)
    job.assert_nothing_left()


def test_coordinator_and_all_agents_die_at_once(server: Server) -> None:
    job = server.example("shakespeare", ["python", "train.py", "--steps", "120", "--sample", "1"], checkpoint={"snapshot_every_steps": 1})
    job.wait_step(20)
    for pid in (*job.actors("Coordinator"), *job.actors("Agent")):
        kill(pid)
    ended = job.wait(120)
    assert (ended["state"], ended["generation"]) == ("SUCCEEDED", 1)
    assert "CoordinatorRestarted" in job.reasons()
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["restored_from"]) == ("agent_lost", "memory")
    assert incident["recovery_seconds"] > 0
    assert_no_gap(job, 120)


def test_a_plain_script_with_four_ranks_killed_twice_ends_right(server: Server) -> None:
    job = server.toy(resources={"nodes": 2}, env={"STEPS": "100"}, checkpoint={})
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


@pytest.mark.parametrize("fault", ["kill", "stop", "hang", "oom", "exit", "agent"])
def test_drills_inject_real_faults_and_the_job_recovers(server: Server, fault: str) -> None:
    spec = {"checkpoint": {"snapshot_every_steps": 1}, "timeouts": {"hang_s": 3}}
    job = server.example("shakespeare", ["python", "train.py", "--steps", "150", "--sample", "1"], **spec)
    job.wait_step(5)
    answer = server.post(f"/jobs/{job.id}/drills", {"fault": fault, "rank": 1})
    assert answer.status_code in (200, 201, 202), answer.text
    assert job.wait(120)["state"] == "SUCCEEDED"
    (incident,) = job.items("incidents")
    cause, signal_number, code = {
        "kill": ("signal", int(signal.SIGKILL), None),
        "stop": ("hang", None, None),
        "hang": ("hang", None, None),
        "oom": ("exception", None, 1) if "MemoryError instead" in answer.text else ("oom_killed", int(signal.SIGKILL), None),
        "exit": ("exit_code", None, 35),
        "agent": ("agent_lost", None, None),
    }[fault]
    assert (incident["cause"], incident["signal"], incident["exit_code"], incident["drill"]) == (cause, signal_number, code, fault)
    assert incident["blamed_rank"] == (None if fault == "agent" else 1)
    assert incident["class"] == ("out_of_memory" if fault == "oom" else "infrastructure")
    assert incident["recovery_seconds"] is not None
    assert_no_gap(job, 150)
