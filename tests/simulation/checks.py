"""What must hold in every run: a store that checks each save, and checks of the end.

Safety is checked at each save, against the row that was there before; liveness when faults have stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select

from orchestrator.adapters.db.tables import LEASES
from orchestrator.core.actions import JobStep
from orchestrator.core.model import Attempt, Job
from orchestrator.core.states import ATTEMPT_TRANSITIONS, TRANSITIONS, AttemptState, Desired, JobState, Reason
from orchestrator.ports import Unavailable
from tests.simulation.clock import Crash, Dice
from tests.simulation.group import CHARGED, Storage


class Violation(BaseException):
    """A rule was broken; the message begins with the rule. Not an Exception, so that the loop cannot take it for a failure of one job."""


class CheckedStore:
    """The real store, with crashes and silences around its writes, and each write checked."""

    def __init__(self, store: Any, dice: Dice, storage: Storage, left_of: Callable[[str], list[Any]]) -> None:
        self._store, self._dice, self._storage, self._left_of = store, dice, storage, left_of
        self.crash = ""  # the next save has a crash before or after it
        self._attempts: dict[str, dict[int, Attempt]] = {}  # as saved last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_jobs(self) -> Any:
        if self._dice.fault(0.01):
            raise Unavailable("database is away")
        return self._store.open_jobs()

    def saved_attempt(self, job_id: str, number: int) -> Attempt | None:
        return self._attempts.get(job_id, {}).get(number)

    def save_told(self, jobs: Sequence[Job], fence: int) -> None:
        if jobs:
            self._check_fence(fence, lambda: self._store.save_told(jobs, fence))

    def _check_fence(self, fence: int, save: Callable[[], Any]) -> Any:
        """The newest fence is read beside the code that is tested."""
        with self._store._engine.begin() as connection:
            newest = connection.execute(select(LEASES.c.fence)).scalar_one()
        saved = save()
        if fence != newest:
            raise Violation(f"who lost the lease writes nothing: {fence} wrote, {newest} leads")
        return saved

    def save_step(self, step: JobStep, fence: int) -> Job:
        if self._dice.fault(0.01):
            raise Unavailable("database is away")
        crash, self.crash = self.crash, ""
        if self._dice.fault(0.01) or crash == "before":
            raise Crash("before the save")
        before = self._store.job(step.job.id)
        saved: Job = self._check_fence(fence, lambda: self._store.save_step(step, fence))
        check_job(before, saved, self._storage)
        if saved.state.final and self._left_of(saved.id):
            raise Violation(f"nothing is left behind a final job: {saved.state}, and {self._left_of(saved.id)} exists")
        if step.attempt is not None:
            known = self._attempts.setdefault(step.job.id, {})
            check_attempt(before, known, step.attempt)
            known[step.attempt.number] = step.attempt
        if self._dice.fault(0.01):
            raise Unavailable("saved, but the answer was lost")
        if self._dice.fault(0.01) or crash == "after":
            raise Crash("after the save")
        return saved


def check_job(before: Job, after: Job, storage: Storage) -> None:
    if before.state != after.state and after.state not in TRANSITIONS[before.state]:
        raise Violation(f"transitions only from the table: {before.state} -> {after.state}")
    if before.state.final and (before.state, before.reason, before.ended_at) != (after.state, after.reason, after.ended_at):
        raise Violation(f"final is final: {before.state}/{before.reason} -> {after.state}/{after.reason}")
    if after.state.final and after.ended_at is None:
        raise Violation("a final job has an end")
    # A late report tells of a moment before later commits; but what was committed before its generation began, that generation restored.
    restored = storage.newest(after.id, before=(after.attempt, after.generation))
    if before.step is not None and (after.step is None or after.step < min(before.step, restored)):
        raise Violation(f"a step never goes back further than the newest checkpoint: {before.step} -> {after.step}")
    if (after.best_step or 0) < (before.best_step or 0) or after.generation < before.generation or after.attempt < before.attempt:
        raise Violation("best step, generation and attempt only grow")
    if not set(before.failures) <= set(after.failures):  # no run is as long as its window
        raise Violation("budgets survive: a failure was forgotten")
    if before.desired is not after.desired:
        raise Violation("only the service writes what is desired")


def check_attempt(job: Job, known: dict[int, Attempt], after: Attempt) -> None:
    before = known.get(after.number)
    if before is None:
        unended = [a.number for a in known.values() if a.state is not AttemptState.ENDED]
        if unended:
            raise Violation(f"one attempt at a time: {after.number} is made while {unended} have not ended")
        restart, now = job.spec.restart, after.created_at
        spent = [f for f in job.failures if f.kind in CHARGED and f.at > now - restart.window_hours * 3600]
        if len(spent) > restart.max_infrastructure:
            raise Violation(f"budgets hold: {len(spent)} failures, and attempt {after.number} is made")
        if job.desired is Desired.CANCEL:
            raise Violation("no attempt is made of a job that shall end")
    elif before.state != after.state and after.state not in ATTEMPT_TRANSITIONS[before.state]:
        raise Violation(f"attempt transitions only from the table: {before.state} -> {after.state}")


def check_verdict(job: Job, attempts: list[Attempt], user_error: bool) -> None:
    """A final state must have a cause."""
    total = int(job.spec.command[1])
    if job.state is JobState.SUCCEEDED and job.best_step != total:
        raise Violation(f"succeeded means all steps: {job.best_step} of {total}")
    if job.state is JobState.CANCELLED and job.desired is not Desired.CANCEL:
        raise Violation("cancelled only when asked")
    if job.state is not JobState.FAILED:
        return
    charged = [f for f in job.failures if f.kind in CHARGED]
    causes = {
        Reason.USER_ERROR: user_error,
        Reason.BUDGET_SPENT: len(charged) > job.spec.restart.max_infrastructure,
        Reason.NO_PROGRESS: len(attempts) >= 4 or len(job.failures) >= 2,
        Reason.RUN_TIMEOUT: job.spec.timeouts.run_hours is not None,
    }
    if not causes.get(Reason(job.reason), False):
        raise Violation(f"a verdict has a cause: {job.reason}: {job.message}")
