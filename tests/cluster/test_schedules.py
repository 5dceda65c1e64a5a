"""Random schedules of faults over a real training with dropout, AdamW and shuffled data: the weights of the unbroken run, to the bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass

import psutil
import pytest

from tests.cluster.conftest import FINAL, STEPS, Job, Server, kill, shakespeare, wait_for, weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Fault:
    """``what`` happens to ``rank``, or to what stands above it, once all ranks have finished ``step``."""

    step: int
    what: str
    rank: int


def schedule(seed: int) -> list[Fault]:
    """Two to four faults; some follow so close that they hit the recovery of the one before."""
    rng = random.Random(seed)
    steps = sorted(rng.randrange(5, STEPS - 20) for _ in range(rng.randint(2, 4)))
    return [Fault(step, rng.choice(["kill", "kill", "stop", "agent", "coordinator", "both"]), rng.randrange(2)) for step in steps]


def send(job: Job, rank: int, number: signal.Signals) -> None:
    """A signal to a rank that lives, whatever recovery is under way."""

    def sent() -> bool:
        ranks = [r for r in job.items("ranks") if r["rank"] == rank and r["ended_at"] is None and r["pid"] is not None]
        for living in ranks:
            try:
                os.kill(living["pid"], number)
            except ProcessLookupError:  # it has just been ended; the next one is on its way
                return False
        return bool(ranks) or job.get()["state"] in FINAL

    wait_for(f"signal {number.name} to rank {rank}", sent)


def inject(job: Job, fault: Fault) -> None:
    match fault.what:
        case "kill":
            send(job, fault.rank, signal.SIGKILL)
        case "both":
            for rank in (0, 1):
                send(job, rank, signal.SIGKILL)
        case "stop":
            send(job, fault.rank, signal.SIGSTOP)
        case "agent":
            drill = {"fault": "agent", "rank": fault.rank}
            path = f"/jobs/{job.id}/drills"
            wait_for("the agent is ended", lambda: job.server.post(path, drill).is_success or job.get()["state"] in FINAL)
        case "coordinator":
            for pid in job.actors("Coordinator"):
                kill(pid)


def assert_succeeded(job: Job) -> None:
    ended = job.wait(200)
    assert (ended["state"], ended["attempt"], ended["step"]) == ("SUCCEEDED", 1, STEPS), ended


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_any_faults_leave_the_weights_of_the_unbroken_run(server: Server, unbroken: str, seed: int) -> None:
    job = shakespeare(server, timeouts={"hang_s": 3})
    for fault in schedule(seed):
        wait_for(f"step {fault.step}", lambda at=fault.step: (job.get()["step"] or 0) >= at or job.get()["state"] == "SUCCEEDED", 120)
        inject(job, fault)
    assert_succeeded(job)
    assert weights(job) == unbroken, schedule(seed)
    if all(fault.what != "agent" for fault in schedule(seed)):  # with an agent goes what ranks printed last
        assert set(job.steps(0)) == set(job.steps(1)) == set(range(1, STEPS + 1))
    for incident in job.items("incidents"):
        assert incident["recovered_at"] is not None, incident
        assert incident["restored_from"] in ("memory", "none"), incident
        assert (incident["lost_steps"] or 0) <= 1, incident
    job.assert_nothing_left()


OFFSETS_S = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.09, 0.12, 0.16, 0.25)


@pytest.mark.parametrize("second", ["launcher's children", *(pytest.param(w, marks=pytest.mark.slow) for w in ("coordinator", "stop"))])
def test_a_second_fault_at_any_moment_of_a_recovery(server: Server, unbroken: str, second: str) -> None:
    """The first ends a rank, the next comes while ranks are ended, state is looked for, ranks start and restore."""
    job = shakespeare(server, timeouts={"hang_s": 3}, restart={"max_infrastructure": 100})
    launchers = [psutil.Process(psutil.Process(job.pid(rank)).ppid()) for rank in (0, 1)]
    for number, offset in enumerate(OFFSETS_S, 1):
        at = number * (STEPS - 40) // len(OFFSETS_S)
        wait_for(f"step {at}", lambda at=at: (job.get()["step"] or 0) >= at, 120)
        if job.get()["state"] in FINAL:  # the control plane's view lags behind a coordinator that is away
            break
        send(job, number % 2, signal.SIGKILL)
        time.sleep(offset)
        victims = [p.pid for p in launchers[0].children()] if second != "coordinator" else job.actors("Coordinator")
        for pid in victims:  # on node 0 the rendezvous stores are among them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if second == "stop" else signal.SIGKILL)
    assert_succeeded(job)
    assert weights(job) == unbroken
    assert len(job.items("incidents")) >= len(OFFSETS_S) // 2
    assert all(incident["recovered_at"] is not None for incident in job.items("incidents"))
    job.assert_nothing_left()
