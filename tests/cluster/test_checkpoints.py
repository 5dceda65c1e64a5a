"""Checkpoints of a real job: tried at once, damaged for real, and passed over when they are needed."""

from __future__ import annotations

import os
import signal

import pytest

from .conftest import SHM, Server, wait_for
from .test_recovery import assert_no_gap

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_damaged_checkpoint_is_found_and_the_one_before_taken(server: Server) -> None:
    job = server.training(checkpoint={"every_steps": 50}, resources={"nodes": 1, "processes_per_node": 2})
    wait_for("two checkpoints", lambda: len(job.items("checkpoints")) >= 2)
    wait_for("the restore test", lambda: "RestoreTested" in job.reasons())
    pids = [job.pid(0), job.pid(1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_for("nothing is being saved", lambda: job.get()["checkpoint_progress"] is None)
    answer = server.post(f"/jobs/{job.id}/drills", {"fault": "corrupt_checkpoint"})
    assert answer.status_code == 200, answer.text
    assert "was changed" in answer.json()["message"]
    damaged = int(answer.json()["message"].split()[1].rstrip(":"))
    for slot in SHM.glob(f"**/{job.id}.*/snap-*"):
        os.truncate(slot, 5000)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    incident = job.recovered(1)
    assert incident["restored_from"] == "storage"
    # A busy machine skips some, and the next generation may have made them since.
    before = [c["step"] for c in job.items("checkpoints") if c["generation"] <= incident["generation"] and c["step"] < damaged]
    assert incident["resumed_step"] == max(before)
    assert "CheckpointInvalid" in job.reasons()
    assert "CheckpointSkipped" in job.reasons()
    job.let_finish()
    ended = job.wait()
    assert ended["state"] == "SUCCEEDED"
    assert_no_gap(job, ended["step"])
