"""A node that dies: its job goes on elsewhere, from the newest checkpoint in storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Server, kill, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A cluster that may be left with a node less."""
    server = Server(tmp_path)
    try:
        server.up()
        yield server
    finally:
        server.down()


def raylet_of(pid: int) -> int:
    """The raylet above a rank."""
    return next(p.pid for p in psutil.Process(pid).parents() if p.name() == "raylet")


@pytest.mark.parametrize("also", ["nothing else", "its coordinator"])
def test_a_lost_node_costs_an_attempt_and_the_job_goes_on_elsewhere(own_server: Server, also: str) -> None:
    """With the coordinator goes all that was known of the group but for what the control plane had heard."""
    job = own_server.training(resources={"nodes": 1}, checkpoint={"every_steps": 20})
    wait_for("a checkpoint", lambda: job.items("checkpoints"))
    (first,) = job.items("attempts")
    (coordinator,) = job.actors("Coordinator")
    assert raylet_of(coordinator) != raylet_of(job.pid(0))
    kill(raylet_of(job.pid(0)))
    if also == "its coordinator":
        kill(coordinator)
    wait_for("the relaunch", lambda: [i for i in job.items("incidents") if i["recovery_seconds"]], 40)
    job.let_finish()
    ended = job.wait()
    assert (ended["state"], ended["attempt"]) == ("SUCCEEDED", 2)
    attempts = {a["attempt"]: a for a in job.items("attempts")}
    assert attempts[1]["outcome"] == "LOST"
    assert attempts[1]["nodes"] == first["nodes"] != attempts[2]["nodes"]
    (incident,) = job.items("incidents")
    assert incident["cause"] in ("agent_lost", "node_lost")
    assert (incident["class"], incident["action"], incident["restored_from"]) == ("infrastructure", "relaunch", "storage")
    assert incident["blamed_node"] == attempts[1]["nodes"][0]["node_id"]
    assert incident["resumed_step"] % 20 == 0
    assert incident["recovery_seconds"] > 0
    assert set(job.noted(0)) == set(range(1, max(job.noted(0)) + 1))
    job.assert_nothing_left()
    states = {n["id"]: n["state"] for n in own_server.get("/nodes")["items"]}
    assert states[incident["blamed_node"]] == "UNREACHABLE"
