"""A cluster of a thousand nodes that answers at once, and a whole control plane over it in a process of its own.

What is measured with it is KeepStep's own work: API, store, observer, plan. Every group that was made trains: each look at it finds the
same report, or while it ``grows`` one more step of every rank and one more event.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from sqlalchemy import insert

from api.app import create_app
from api.serve import context_of, stay_responsive
from orchestrator.adapters.db.engine import open_engine, writing
from orchestrator.adapters.db.leases import SqlLeases
from orchestrator.adapters.db.rows import row
from orchestrator.adapters.db.schema import upgrade
from orchestrator.adapters.db.store import SqlStore
from orchestrator.adapters.db.tables import ATTEMPTS, EVENTS, JOBS, LABELS
from orchestrator.bootstrap import assemble
from orchestrator.clock import SystemClock
from orchestrator.core.model import Attempt, Event, GroupView, Job, Node, NodeState, Presence
from orchestrator.core.spec import JobSpec
from orchestrator.core.states import AttemptState, JobState
from workers.messages import GroupEvent, GroupPhase, GroupReport, GroupSpec, NodePlace, Outcome, RankPhase, RankReport, RankState

Key = tuple[str, int]
TOKEN = "benchmark-token-of-enough-length"
NODES, GPUS, CPUS, MEMORY_GB = 1000, 8, 64.0, 512.0
JOB_NODES = 2  # of a running job, so that 500 of them fill the cluster
TEAMS = 20
TOLD = 10  # events of an attempt that a report tells again


class Cluster:
    """The Groups and Nodes ports. ``full``: programs of others hold all GPUs."""

    def __init__(self, groups: dict[Key, tuple[NodePlace, ...]], *, full: bool) -> None:
        self._groups, self._full, self._looks, self.grows = groups, full, 0, False

    def observe(self, keys: Sequence[Key], fence: int | None) -> dict[Key, GroupView]:
        self._looks += self.grows
        return {key: self._view(key) for key in keys}

    def _view(self, key: Key) -> GroupView:
        nodes = self._groups.get(key)
        return GroupView(Presence.ABSENT) if nodes is None else GroupView(Presence.PRESENT, _report(key, nodes, 1 + self._looks))

    def existing(self) -> set[Key]:
        return set(self._groups)

    def create(self, spec: GroupSpec, fence: int) -> None:
        self._groups[spec.job_id, spec.attempt] = spec.nodes

    def end(self, job_id: str, attempt: int, grace_s: float, fence: int) -> None:
        self.remove(job_id, attempt, fence)

    def remove(self, job_id: str, attempt: int, fence: int) -> bool:
        self._groups.pop((job_id, attempt), None)
        return True

    def drill(self, job_id: str, attempt: int, fault: str, rank: int) -> str:
        raise ValueError("nothing here can fail")

    def nodes(self) -> tuple[Node, ...]:
        taken = {place.node_id for nodes in self._groups.values() for place in nodes}
        return tuple(_node(number, free=not self._full and node_id(number) not in taken) for number in range(NODES))


def node_id(number: int) -> str:
    return f"{number:056x}"


def _node(number: int, *, free: bool) -> Node:
    share = (CPUS, GPUS, MEMORY_GB) if free else (CPUS - GPUS, 0, MEMORY_GB / 2)
    return Node(node_id(number), f"node-{number}", "10.0.0.1", NodeState.READY, CPUS, GPUS, MEMORY_GB, *share)


def _report(key: Key, nodes: tuple[NodePlace, ...], look: int) -> GroupReport:
    now = time.time()
    ranks = tuple(
        RankReport(
            rank=place.index * GPUS + local, node_index=place.index, node_id=place.node_id, local_rank=local, generation=0,
            pid=1000 + local, state=RankState.RUNNING, phase=RankPhase.STEP, phase_at=now - look, step=look, step_at=now, step_seconds=0.2,
            attached=True, started_at=now - look,
        )
        for place in nodes
        for local in range(GPUS)
    )  # fmt: skip
    told = tuple(GroupEvent(seq, now, "Progress", f"step {seq}", 0) for seq in range(max(1, look - TOLD), look + 1))
    return GroupReport(
        key[0], key[1], look, 0, GroupPhase.RUNNING, "Training", "trains", ranks, step=look, best_step=look, metrics={"loss": 1 / look},
        events=told, started_at=now - look,
    )  # fmt: skip


# What the database holds at the begin.


def fill(url: str, ended: int, running: int, pending: int) -> None:
    """Jobs in these states, each with the history that goes with its state."""
    engine = open_engine(url)
    upgrade(engine)
    now = time.time()
    jobs = [_job(number, now - 1e6 + number) for number in range(ended + running + pending)]
    attempts: list[Attempt] = []
    for number in range(ended):
        jobs[number] = replace(jobs[number], state=JobState.SUCCEEDED, reason="Completed", attempt=1, generation=0, step=500, ended_at=now)
        attempts.append(_attempt(jobs[number], number, AttemptState.ENDED))
    for number in range(running):
        job = replace(jobs[ended + number], state=JobState.RUNNING, reason="Training", attempt=1, generation=0, step=1, started_at=now)
        jobs[ended + number] = job
        attempts.append(_attempt(job, number, AttemptState.ACTIVE))
    told = [Event(job.id, job.created_at + n, "Submitted", f"line {n} of its history") for job in jobs for n in range(10)]
    labels = [{"job_id": job.id, "key": key, "value": text} for job in jobs for key, text in job.spec.labels.items()]
    with writing(engine) as connection:
        connection.execute(insert(JOBS), [row(JOBS, job) for job in jobs])
        connection.execute(insert(LABELS), labels)
        if attempts:
            connection.execute(insert(ATTEMPTS), [row(ATTEMPTS, attempt) for attempt in attempts])
        connection.execute(insert(EVENTS), [row(EVENTS, event) for event in told])
    engine.dispose()


def spec(number: int) -> dict[str, Any]:
    """Of a job of two whole nodes."""
    resources = {"nodes": JOB_NODES, "processes_per_node": GPUS, "gpus_per_node": GPUS, "cpus_per_node": GPUS, "memory_gb": 64}
    labels = {"team": f"team-{number % TEAMS}", "run": f"run-{number}"}
    return {"name": f"job {number}", "framework": "plain", "command": ["python", "train.py"], "resources": resources, "labels": labels}


def _job(number: int, at: float) -> Job:
    digits = "abcdefghijklmnopqrstuvwxyz234567"
    name = "job-aaaaaaaa" + "".join(digits[number >> shift & 31] for shift in (15, 10, 5, 0))
    parsed = JobSpec.model_validate(spec(number))
    return Job(name, parsed.name, parsed, JobState.PENDING, "Submitted", "waits for its first look", at)


def _attempt(job: Job, number: int, state: AttemptState) -> Attempt:
    nodes = tuple(NodePlace(index, node_id((JOB_NODES * number + index) % NODES)) for index in range(JOB_NODES))
    ranks = _report((job.id, 1), nodes, 1).ranks
    outcome = Outcome.SUCCEEDED if state is AttemptState.ENDED else None
    need = job.spec.resources
    return Attempt(
        job.id, 1, state, nodes, need.cpus_per_node, need.gpus_per_node, need.memory_gb, job.created_at, generation=0, ranks=ranks,
        outcome=outcome,
    )  # fmt: skip


# The control plane.


@dataclass
class Server:
    """One in a process of its own; ``passes`` and ``work`` are orders to it."""

    port: int
    _orders: Connection
    _process: psutil.Process

    def passes(self, count: int, *, grows: bool) -> list[float]:
        """Seconds of whole passes of its reconciler, one after the other."""
        return list(self._ask(("passes", count, grows)))

    def work(self) -> None:
        """From now on its reconciler runs by itself, and groups grow."""
        self._ask(("work",))

    @property
    def rss_mb(self) -> float:
        return float(self._process.memory_info().rss / 1e6)

    def _ask(self, order: tuple[Any, ...]) -> Any:
        self._orders.send(order)
        return self._orders.recv()


@contextmanager
def serving(url: str, folder: Path, *, full: bool = False) -> Iterator[Server]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(url, str(folder), full, theirs))
    process.start()
    assert process.pid is not None
    try:
        yield Server(ours.recv(), ours, psutil.Process(process.pid))
        ours.send(("end",))
        process.join(20)
    finally:
        process.kill()
        process.join()


def _serve(url: str, storage: str, full: bool, orders: Connection) -> None:
    engine, clock = open_engine(url), SystemClock()
    store = SqlStore(engine)
    _, attempts = store.open_jobs()
    cluster = Cluster({(a.job_id, a.number): a.nodes for a in attempts.values()}, full=full)
    control = assemble(store, cluster, cluster, clock, storage, threading.Event(), SqlLeases(engine), "simulated", sole=True)
    control.leadership.beat()
    server = _Thread(uvicorn.Config(create_app(context_of(control), TOKEN), port=0, log_config=None, access_log=False))
    stay_responsive()
    threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True).start()
    server.up.wait()
    orders.send(server.servers[0].sockets[0].getsockname()[1])
    while True:
        match orders.recv():
            case ("passes", count, grows):
                cluster.grows = grows
                orders.send([_timed(control.reconciler.once) for _ in range(count)])
            case ("work",):
                cluster.grows = True
                control.reconciler.start()
                orders.send(None)
            case _:
                os._exit(0)


class _Thread(uvicorn.Server):
    """A server in a thread: orders come to the main one."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _timed(once: Any) -> float:
    began = time.perf_counter()
    once()
    return time.perf_counter() - began
