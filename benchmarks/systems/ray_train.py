"""Ray Train, on a Ray cluster of its own that is started and ended as KeepStep's: same Ray settings, one node with CPUs for all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from orchestrator.adapters.ray import daemon
from orchestrator.adapters.ray.session import ray_environment
from systems.system import SCRIPTS, START_LIMIT_S, Job, Service, environment, program, wait_for

CPUS = 8
POLL = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}  # its default of 2 s would be a good part of a recovery


class RayTrain:
    """A checkpoint is reported every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.name = f"Ray Train, a checkpoint every {every} steps" if every > 1 else "Ray Train, a checkpoint after each step"

    @contextmanager
    def up(self, folder: Path) -> Iterator[Service]:
        cluster = daemon.start(folder, nodes=1, cpus_per_node=CPUS)
        try:
            yield _Cluster(cluster.address, cluster.token, self.every)
        finally:
            daemon.stop(folder)


class _Cluster:
    def __init__(self, address: str, token: str, every: int) -> None:
        self._address, self._every = address, every
        self._env = environment() | ray_environment(token) | POLL

    @contextmanager
    def submit(self, folder: Path, ranks: int) -> Iterator[Job]:
        command = [str(SCRIPTS / "ray_trainer.py"), self._address, str(folder), str(ranks), str(self._every)]
        job = Job(folder, ranks, time.time())
        with (folder / "output").open("w") as output, program(*command, env=self._env, output=output):
            yield job
        # Ray ends what a driver leaves; the next job must not share the cores with it.
        pids = {step.pid for rank in range(ranks) for step in job.steps(rank)}
        wait_for(lambda: not any(map(psutil.pid_exists, pids)), START_LIMIT_S, "the end of Ray Train's workers")
