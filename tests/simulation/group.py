"""A simulated group: its ranks, their steps and what its coordinator knows. It keeps the wire contract; time makes it move.

``alive`` is the truth (ranks may train), the report is what can be known of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.simulation.clock import Dice
from workers.messages import (
    CheckpointRecord,
    Failure,
    FailureClass,
    GroupEvent,
    GroupPhase,
    GroupReport,
    GroupSpec,
    Incident,
    Outcome,
    Source,
)

CHECKPOINT_EVERY = 20
CHARGED = (FailureClass.INFRASTRUCTURE, FailureClass.UNKNOWN)


@dataclass
class Storage:
    """The folders of all jobs: committed steps, newest last, and who committed each."""

    commits: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)  # job id -> (attempt, generation, step)

    def newest(self, job_id: str) -> int:
        return max((step for _, _, step in self.commits.get(job_id, [])), default=0)


class SimGroup:
    def __init__(self, spec: GroupSpec, now: float, dice: Dice, storage: Storage) -> None:
        self.spec, self.dice, self.storage = spec, dice, storage
        self.total = int(spec.command[1])
        self.placed = False
        self.coordinator = True
        self.coordinator_back_at: float | None = None
        self.silent_until = 0.0
        self.ready_at = now + dice.between(0.1, 4)
        self.end_at: float | None = None
        self.step = 0
        self.memory: int | None = None  # step in host memory
        self.rate = dice.between(1, 4)
        self.trained_at = now
        self.seq = 0
        self.generation = spec.first_generation
        self.report = GroupReport(
            spec.job_id, spec.attempt, 1, -1, GroupPhase.PLACING, "Placing", "waits for its nodes", failures=spec.prior_failures
        )
        self.history: list[GroupReport] = []

    @property
    def key(self) -> tuple[str, int]:
        return (self.spec.job_id, self.spec.attempt)

    @property
    def alive(self) -> bool:
        """Ranks may run and commit."""
        return self.placed and self.report.outcome is None

    def advance(self, now: float) -> None:
        """Lets the time until ``now`` pass."""
        if not self.coordinator and self.coordinator_back_at is not None and now >= self.coordinator_back_at:
            self._coordinator_returns(now)
        if self.report.outcome is not None or not self.placed:
            self.trained_at = now
            return
        if self.report.phase is GroupPhase.RUNNING:
            self._train(now)
        self.trained_at = now
        if self.report.outcome is not None or not self.coordinator:
            return
        if self.end_at is not None:
            if now >= self.end_at:
                self._finish(Outcome.STOPPED, "Stopped", "ended as asked", now)
        elif now >= self.ready_at:
            self._next_phase(now)

    def _next_phase(self, now: float) -> None:
        phase = self.report.phase
        if phase is GroupPhase.PLACING:
            self._say(GroupPhase.WARMING, "Warming", "launchers import")
        elif phase is GroupPhase.WARMING:
            self.step = self.storage.newest(self.spec.job_id) if self.memory is None else self.memory
            self._say(GroupPhase.STARTING, "Launched", "ranks start", generation=self.generation)
        elif phase in (GroupPhase.STARTING, GroupPhase.RECOVERING):
            incidents = tuple(
                i if i.recovered_at is not None else replace(i, recovered_at=now, resumed_step=self.step) for i in self.report.incidents
            )
            self._say(
                GroupPhase.RUNNING,
                "Training",
                "trains",
                incidents=incidents,
                started_at=self.report.started_at or now,
                resumed_step=self.step,
                restored_from=Source.STORAGE if self.memory is None else Source.MEMORY,
            )
        self.ready_at = now + self.dice.between(0.1, 3)

    def _train(self, now: float) -> None:
        before = self.step
        self.step = min(self.total, before + int((now - self.trained_at) * self.rate) + 1)
        self.memory = self.step
        saved = []
        for step in range(before + 1, self.step + 1):
            if step % CHECKPOINT_EVERY == 0:
                self.storage.commits.setdefault(self.spec.job_id, []).append((self.spec.attempt, self.generation, step))
                url = f"{self.spec.storage_url}/{step}.{self.spec.attempt}.{self.generation}"
                saved.append(
                    CheckpointRecord(self.spec.job_id, self.spec.attempt, self.generation, step, url, 1, 1, self.spec.world_size, now, 0.1)
                )
        if not self.coordinator:
            return  # ranks train on; nobody notes it
        best = max(self.step, self.report.best_step or 0)
        self._say(step=self.step, best_step=best, checkpoints=(*self.report.checkpoints, *saved)[-5:], metrics={"loss": 1 / self.step})
        if self.step >= self.total:
            self._finish(Outcome.SUCCEEDED, "Completed", "all ranks ended with 0", now)

    def rank_fails(self, kind: FailureClass, now: float) -> None:
        """A rank ends by a signal, an exception, or hangs; the coordinator restarts in place as the budget allows."""
        if self.report.phase not in (GroupPhase.STARTING, GroupPhase.RUNNING, GroupPhase.RECOVERING) or not self.coordinator:
            return
        failure = Failure(now, kind, str(kind), f"{kind} at {self.spec.command[0]}", self.report.best_step)
        failures = (*self.report.failures, failure)
        spent = [f for f in failures if f.kind in CHARGED and f.at > now - self.spec.window_s]
        stop = kind is FailureClass.USER or len(spent) > self.spec.max_infrastructure
        incident = Incident(
            self.spec.job_id,
            self.spec.attempt,
            self.generation,
            now,
            str(kind),
            kind,
            "a rank failed",
            "stop" if stop else "restart_in_place",
        )
        self.seq += 1
        event = GroupEvent(self.seq, now, "RankFailed", f"a rank failed: {kind}", self.generation)
        self._say(failures=failures, incidents=(*self.report.incidents, incident), events=(*self.report.events, event))
        if stop:
            reason = "UserError" if kind is FailureClass.USER else "BudgetSpent"
            self._finish(Outcome.FAILED, reason, "no restart is left", now)
            return
        self.generation += 1
        self.ready_at = now + self.dice.between(0.1, 3)
        self._say(GroupPhase.RECOVERING, "Restarting", "ranks start again", generation=self.generation)

    def node_lost(self, now: float) -> None:
        """Its coordinator gives the group up: another placement is needed."""
        if self.alive and self.coordinator:
            failure = Failure(now, FailureClass.INFRASTRUCTURE, "node_lost", "node_lost", self.report.best_step)
            incident = Incident(
                self.spec.job_id,
                self.spec.attempt,
                self.generation,
                now,
                "node_lost",
                FailureClass.INFRASTRUCTURE,
                "a node is gone",
                "relaunch",
            )
            self._say(failures=(*self.report.failures, failure), incidents=(*self.report.incidents, incident))
            self._finish(Outcome.LOST, "NodeLost", "a node is gone", now)

    def _incident(self, kind: FailureClass, cause: str, action: str, now: float) -> Incident:
        return Incident(self.spec.job_id, self.spec.attempt, self.generation, now, cause, kind, f"{cause}: {action}", action)

    def coordinator_dies(self, now: float, back_in: float) -> None:
        self.coordinator, self.coordinator_back_at = False, now + back_in

    def _coordinator_returns(self, now: float) -> None:
        """With the memory of some earlier moment; its agents tell it the rest."""
        self.coordinator, self.coordinator_back_at = True, None
        if self.history and self.dice.fault(0.7):
            old = self.dice.random.choice(self.history)
            self.report = replace(old, step=self.report.step, generation=self.report.generation, started_at=self.report.started_at)
        if self.report.outcome is None and self.placed:
            self._say(GroupPhase.WARMING, "Reattaching", "collects its agents")
            self.generation += 1
            self.ready_at = now + 1

    def end(self, now: float, grace_s: float) -> None:
        if self.end_at is None and self.report.outcome is None:
            self.end_at = now + self.dice.between(0, grace_s)
            if not self.placed:
                self._finish(Outcome.STOPPED, "Stopped", "ended before it was placed", now)
            else:
                self._say(GroupPhase.ENDING, "Ending", "ranks got SIGTERM")

    def _finish(self, outcome: Outcome, reason: str, message: str, now: float) -> None:
        self._say(GroupPhase.ENDED, reason, message, outcome=outcome, ended_at=now)

    def _say(self, phase: GroupPhase | None = None, reason: str | None = None, message: str | None = None, **facts: object) -> None:
        self.history = [*self.history[-20:], self.report]
        old = self.report
        words = {"phase": phase or old.phase, "reason": reason or old.reason, "message": message or old.message}
        self.report = replace(old, version=old.version + 1, **words, **facts)  # type: ignore[arg-type]
