"""State from another node's memory, through Ray: the job ends with the weights of the run that nothing happened to."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import Job, Server, kill, shakespeare, wait_for, weights
from workers.checkpoint.slots import read_header
from workers.processes import SHM

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def memory(job: Job, node: int) -> Path:
    """Where that node of the job's first attempt has its snapshots."""
    (folder,) = SHM.glob(f"**/{job.id}.1.{node}")
    return folder


def damage_shared_part(folder: Path) -> None:
    """Flip a byte of the arrays that all ranks share, in every snapshot of a node."""
    slots = list(folder.glob("snap-*"))
    assert len(slots) >= 2
    for slot in slots:
        header = read_header(slot)
        assert header is not None
        with open(slot, "r+b") as file:
            file.seek(header.shared_sections()[0].stop - 100)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 16]))


def stop(job: Job) -> list[int]:
    """Freeze both ranks, so that what memory holds does not change any more; returns their pids."""
    pids = [job.pid(rank) for rank in (0, 1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def mirrored(job: Job) -> int | None:
    """The step of the memory checkpoint, where there is one and both nodes have all of it."""
    files = [sorted(f"{p.parent.name}/{p.name}" for p in memory(job, node).glob("copies-*/*")) for node in (0, 1)]
    if files[0] != files[1] or len(files[0]) != 2 or any(name.endswith(".new") for name in files[0]):
        return None
    return int(files[0][0].split("/")[0].removeprefix("copies-"))


def test_damaged_and_lost_memory_is_made_whole_by_the_other_node(server: Server, unbroken: str) -> None:
    job = shakespeare(server, checkpoint={"every_steps": 15})
    job.wait_step(10)
    _, victim = stop(job)
    damage_shared_part(memory(job, 0))
    kill(victim)
    incident = job.recovered(1)
    assert (incident["restored_from"], incident["blamed_rank"]) == ("peer", 1)
    assert incident["lost_steps"] in (0, 1)

    job.wait_step(35)
    _, victim = stop(job)
    step = wait_for("a memory checkpoint", lambda: mirrored(job))
    shutil.rmtree(memory(job, 1))
    kill(victim)
    incident = job.recovered(2)
    assert (incident["restored_from"], incident["resumed_step"]) == ("peer", step)
    assert step % 15 == 0

    assert job.wait(120)["state"] == "SUCCEEDED"
    assert job.reasons().count("PeerStateTaken") == 2
    assert weights(job) == unbroken
    job.assert_nothing_left()
