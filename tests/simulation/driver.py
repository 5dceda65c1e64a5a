"""One simulated run: users, faults and the real control loop over the real store, then a calm in which everything must end."""

from __future__ import annotations

import threading
from typing import Any

from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.store import SqlStore
from orchestrator.adapters.db.tables import METADATA
from orchestrator.adapters.storage.checkpoints import StoredCheckpoints
from orchestrator.core.group_spec import Roots
from orchestrator.core.model import Job
from orchestrator.core.spec import JobSpec
from orchestrator.core.states import AttemptState, Desired
from orchestrator.leadership import Leadership
from orchestrator.ports import Unavailable
from orchestrator.reconciler import Reconciler
from orchestrator.service import Refused, Service
from tests.simulation.checks import CheckedStore, Violation, check_verdict
from tests.simulation.clock import Crash, Dice, SimClock, at_once
from tests.simulation.cluster import SimCluster
from tests.simulation.leases import DicedLeases, add_lease

ROUNDS = 45  # with faults
CALM_S = 3 * 3600.0  # within which everything must have ended
ENDLESS = 100_000  # steps of a job that ends only by being cancelled
CANCEL_S = 200.0  # within which a job must have ended that was cancelled before the calm
ROOTS = Roots("/storage/jobs", "/storage/bundles")
FAILS = ("kill", "kill", "hang", "bug")


class Run:
    """Everything of one seed."""

    def __init__(self, seed: int, nodes: int | None = None) -> None:
        self.dice, self.clock = Dice(seed), SimClock()
        self.cluster = SimCluster(self.clock, self.dice, nodes=nodes or self.dice.random.randint(1, 4))
        self.engine = open_engine("sqlite://")
        METADATA.create_all(self.engine)
        add_lease(self.engine)
        self.leases = DicedLeases(self.engine, self.dice)
        self.store: Any = CheckedStore(SqlStore(self.engine), self.dice, self.cluster.storage, self.cluster.left_of)
        self.cluster.saved_attempt = self.store.saved_attempt
        self.wake = threading.Event()
        ids = iter(range(10**6))
        self.service = Service(
            self.store, self.cluster, self.cluster, self.clock, self.wake,
            bundle_exists=lambda sha: True, stored=StoredCheckpoints(), folder_of=lambda job: job.id,
            new_id=lambda: f"job-{next(ids):012d}",
        )  # fmt: skip
        self.wakes_at = [0.0, 0.0]  # of each server; until then it sleeps
        self.servers = [self.new_server(0), self.new_server(1)]
        self.cluster.in_between = self._in_between
        self.nested = False
        self.jobs: list[str] = []
        self.user_errors: set[str] = set()

    def new_server(self, which: int) -> tuple[Leadership, Reconciler]:
        lease = Leadership(self.leases, f"server {which}", "cluster", self.wake, monotonic=self.clock.now)
        return lease, Reconciler(self.store, self.cluster, self.cluster, self.clock, ROOTS, self.wake, lease, submit=at_once)

    def whole(self) -> None:
        """Faults for a while, then calm until everything has ended; raises Violation."""
        try:
            for _ in range(ROUNDS):
                self.clock.at += self.dice.between(0.05, 6)
                self.cluster.advance()
                self._user()
                self._accident()
                self.turn()
                self.check_now()
            self._calm()
        finally:
            self.engine.dispose()

    # who does what

    def _user(self) -> None:
        if len(self.jobs) < 5 and self.dice.random.random() < 0.15:
            self._submit()
        if self.jobs and self.dice.fault(0.03):
            self._cancel(self.dice.random.choice(self.jobs))

    def _submit(self) -> None:
        random = self.dice.random
        self.submit({
            "name": f"job {len(self.jobs)}",
            "framework": "plain",
            "command": ["train", str(ENDLESS if random.random() < 0.1 else random.randint(10, 200))],
            "resources": {
                "nodes": random.randint(1, len(self.cluster.node_ids)),
                "cpus_per_node": random.choice([1, 2, 4]),
                "processes_per_node": random.randint(1, 2),
            },
            "restart": {"max_infrastructure": random.choice([0, 2, 20]), "max_user_errors": random.choice([0, 0, 2])},
            "timeouts": {"start_s": 60, "grace_s": random.choice([0, 5, 20]), "run_hours": random.choice([None, None, 0.05])},
            "priority": random.choice([50, 50, 70]),
        })  # fmt: skip

    def submit(self, spec: dict[str, Any]) -> None:
        try:
            self.jobs.append(self.service.submit(JobSpec.model_validate(spec), None, "")[0].id)
        except Unavailable:
            return

    def _cancel(self, job_id: str) -> None:
        try:
            self.service.cancel(job_id, self.dice.random.choice([None, 0.0, 10.0]))
        except Refused as refused:
            if refused.code != "job_is_final":
                raise

    def _accident(self) -> None:
        random, now, cluster = self.dice.random, self.clock.now(), self.cluster
        if self.dice.fault(0.03):
            cluster.silent_until = now + random.choice([1, 10, 90])
        if self.dice.fault(0.04):
            node = random.choice(cluster.node_ids)
            cluster.down ^= {node}
        keys = sorted(cluster.groups)
        if not keys or not self.dice.fault(0.3):
            return
        key = random.choice(keys)
        group = cluster.groups[key]
        match random.choice(["rank", "rank", "rank", "memory", "memory", "agent", "vanish", "silent", "coordinator"]):
            case "rank":
                how = random.choice(FAILS)
                if how == "bug":
                    self.user_errors.add(key[0])
                group.rank_fails(how, now)
            case "memory":  # which is noticed when a rank fails
                group.memory_fails(random.choice(["wipe", "damage"]))
                group.rank_fails("kill", now)
            case "agent":
                group.agent_dies(now, back_in=random.choice([0.5, 5, 100]))
            case "vanish":
                cluster.vanish(key)
            case "silent":
                group.silent_until = now + random.choice([1, 8, 120])
            case "coordinator":
                group.coordinator_dies(now, back_in=random.choice([1, 5, 60]), forgets=random.random() < 0.5)

    def _in_between(self) -> None:
        """While one pass waits for Ray: another reconciler makes a whole pass, or a user cancels."""
        if self.nested or not self.dice.faults:
            return
        self.nested = True
        try:
            if self.dice.fault(0.15):  # as long as a lease lasts, so that the other one takes it in the middle of this pass
                self.clock.at += self.dice.between(2.5, 4)
                self.turn()
            if self.jobs and self.dice.fault(0.06):
                self._cancel(self.dice.random.choice(self.jobs))
        finally:
            self.nested = False

    def turn(self) -> None:
        """Both servers beat and make a pass, unless they sleep."""
        for which in self.dice.random.sample((0, 1), 2):
            if self.dice.fault(0.04):
                self.wakes_at[which] = self.clock.now() + self.dice.between(1, 30)
            if self.clock.now() >= self.wakes_at[which] or not self.dice.faults:
                self._serve(which)

    def _serve(self, which: int) -> None:
        lease, loop = self.servers[which]
        try:
            lease.beat()
            loop.once()
        except Unavailable:
            pass
        except Crash:
            self.servers[which] = self.new_server(which)
        if loop.errors:
            raise Violation("no error that nobody foresaw")

    # checks

    def check_now(self) -> None:
        if self.cluster.violations:
            raise Violation(self.cluster.violations[0])

    def _calm(self) -> None:
        self.dice.faults = False
        self.cluster.down.clear()
        self.cluster.silent_until = 0.0
        for group in self.cluster.groups.values():
            group.silent_until = 0.0
        for job in self.unfinished():
            if int(job.spec.command[1]) == ENDLESS:
                self._cancel(job.id)
        until, cancelled_until = self.clock.now() + CALM_S, self.clock.now() + CANCEL_S
        while (unfinished := self.unfinished()) or self.cluster.groups or self.cluster.late:
            told = [f"{job.id} {job.state}/{job.reason}: {job.message}" for job in unfinished]
            if self.clock.now() > until:
                raise Violation(f"every job ends, and no group is left: {told} {sorted(self.cluster.groups)}")
            if self.clock.now() > cancelled_until and any(job.desired is Desired.CANCEL for job in unfinished):
                raise Violation(f"a cancelled job ends soon: {told}")
            self.clock.at += self.dice.between(2, 12)
            self.cluster.advance()
            self.turn()
            self.check_now()
        for job_id in self.jobs:
            job, attempts = self.job(job_id), self.store.attempts(job_id)
            check_verdict(job, attempts, job_id in self.user_errors)
            if any(attempt.state is not AttemptState.ENDED for attempt in attempts):
                raise Violation(f"no attempt outlives its job: {job_id}")

    def unfinished(self) -> list[Job]:
        jobs: list[Job] = self.store.open_jobs()[0]
        return jobs

    def job(self, job_id: str) -> Job:
        job = self.store.job(job_id)
        assert isinstance(job, Job)
        return job
