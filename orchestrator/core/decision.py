"""One decision about one job while it is being made. PURE.

Invariant: job and attempt change their state only along the tables of ``states``; a change of state or reason leaves an event.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.core.actions import Action, JobStep
from orchestrator.core.model import Attempt, Event, Job
from orchestrator.core.states import ATTEMPT_TRANSITIONS, AttemptState, JobState, Reason, allowed
from workers.messages import CheckpointCheck, CheckpointRecord, Incident


class Decision:
    """Collects what shall be saved and done; ``step`` hands it over."""

    def __init__(self, job: Job, attempt: Attempt | None, now: float) -> None:
        self._before = (replace(job, look_again_at=None), attempt)
        self.job = job
        self.now = now
        self._attempt = attempt
        self._deadlines: list[float] = []
        self._events: list[Event] = []
        self._actions: list[Action] = []
        self._incidents: list[Incident] = []
        self._checkpoints: list[CheckpointRecord] = []
        self._pruned: list[str] = []
        self._checks: list[CheckpointCheck] = []

    @property
    def attempt(self) -> Attempt:
        assert self._attempt is not None, f"{self.job.id} has no attempt"
        return self._attempt

    def job_is(self, state: JobState, reason: Reason | str, message: str, **facts: Any) -> None:
        """The job's state from now on; it may be the old one with a new reason or message."""
        old = self._before[0].state  # one decision makes at most one transition, for that is what the rows show
        if not allowed(old, state) or self.job.state not in (old, state):
            raise AssertionError(f"{self.job.id}: {old} must not become {state} ({reason}: {message})")
        if (self.job.state, self.job.reason) != (state, str(reason)):
            self.tell(str(reason), message)
        self.job = replace(self.job, state=state, reason=str(reason), message=message, **facts)

    def attempt_is(self, state: AttemptState, **facts: Any) -> None:
        old = self.attempt.state
        if old != state and state not in ATTEMPT_TRANSITIONS[old]:
            raise AssertionError(f"{self.job.id}: attempt {self.attempt.number} is {old} and must not become {state}")
        self._attempt = replace(self.attempt, state=state, **facts)

    def new_attempt(self, attempt: Attempt) -> None:
        assert self._attempt is None or self._attempt.state is AttemptState.ENDED, f"{self.job.id}: the last attempt has not ended"
        self._attempt = attempt

    def learn(self, **facts: Any) -> None:
        """Facts of the job that are no change of state."""
        self.job = replace(self.job, **facts)

    def learn_attempt(self, **facts: Any) -> None:
        self._attempt = replace(self.attempt, **facts)

    def do(self, action: Action) -> None:
        self._actions.append(action)

    def tell(self, reason: str, message: str) -> None:
        number = self._attempt.number if self._attempt is not None else None
        self._events.append(Event(self.job.id, self.now, reason, message, attempt=number))

    def record(
        self,
        events: tuple[Event, ...] = (),
        incidents: tuple[Incident, ...] = (),
        checkpoints: tuple[CheckpointRecord, ...] = (),
        pruned: tuple[str, ...] = (),
        checks: tuple[CheckpointCheck, ...] = (),
    ) -> None:
        """What a group reported, to be saved with the decision."""
        self._events += events
        self._incidents += incidents
        self._checkpoints += checkpoints
        self._pruned += pruned
        self._checks += checks

    def look_again(self, at: float) -> None:
        """Decide anew at ``at`` (Unix seconds) even if nothing changes."""
        self._deadlines.append(at)

    def step(self) -> JobStep:
        recorded = self._events or self._incidents or self._checkpoints or self._pruned or self._checks
        after = (replace(self.job, look_again_at=None), self._attempt)
        return JobStep(
            job=replace(self.job, look_again_at=min(self._deadlines, default=None)),
            attempt=self._attempt,
            events=tuple(self._events),
            incidents=tuple(self._incidents),
            checkpoints=tuple(self._checkpoints),
            pruned=tuple(self._pruned),
            checks=tuple(self._checks),
            actions=tuple(self._actions),
            changed=bool(recorded) or after != self._before,
        )
