"""Hangs and kernel kills on a real cluster: found in time, blamed by evidence, and the job goes on."""

from __future__ import annotations

import time

import pytest

from tests.cluster.conftest import Server, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SLEEPS = """
import os, threading, time
import torch, workers

run = workers.start()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.restore(model=model, optimizer=optimizer)
threading.Thread(target=lambda: [time.sleep(0.2) for _ in range(10_000)], daemon=True).start()  # alive, whatever the main thread does

def read_sample():
    if run.rank == 1 and run.steps == 7 and os.environ["KEEPSTEP_GENERATION"] == "0":
        print("stuck", flush=True)
        time.sleep(3600)

while run.steps < 30:
    read_sample()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    run.step()
    time.sleep(0.02)
"""


def test_a_rank_that_sleeps_outside_of_the_collective_is_named_with_its_stack(server: Server) -> None:
    job = server.submit({"train.py": SLEEPS}, timeouts={"hang_s": 3}, resources={"nodes": 2}, checkpoint={})
    wait_for("it is stuck", lambda: "stuck" in job.log(1))
    stuck_at = time.time()
    ended = job.wait()
    (incident,) = job.items("incidents")
    assert ended["state"] == "SUCCEEDED"
    assert (incident["cause"], incident["class"], incident["blamed_rank"]) == ("hang", "unknown", 1)
    assert "it is not in the collective but in read_sample (train.py:" in incident["message"]
    assert "read_sample (train.py:" in incident["excerpt"]
    assert set(incident["stacks"]) == {"0", "1"}
    assert "torch/" in incident["stacks"]["0"]
    assert incident["lost_steps"] == 0
    recovered_after = incident["recovery_seconds"]
    assert 3.0 <= recovered_after < time.time() - stuck_at + 1
    assert 3000 <= incident["phases_ms"]["detect"] < 10_000


QUIET = "import os, time\nprint('up', flush=True)\ntime.sleep(1000 if os.environ['KEEPSTEP_GENERATION'] < '9' else 0)\n"


def test_a_script_without_steps_that_is_silent_is_not_started_for_ever(server: Server) -> None:
    job = server.submit({"train.py": QUIET}, framework="plain", resources={"nodes": 1}, checkpoint={}, timeouts={"silence_s": 1})
    ended = job.wait()
    assert (ended["state"], ended["reason"]) == ("FAILED", "NoProgress")
    incidents = job.items("incidents")
    assert [i["cause"] for i in incidents] == ["hang"] * 3
    assert "no log output and no CPU time for 1" in incidents[0]["message"]
    assert "<module> (train.py:3)" in incidents[0]["excerpt"]
