"""What a plan consists of: per job one step that is saved atomically, and the idempotent work that follows it. PURE values."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.model import Attempt, Event, Job
from orchestrator.core.states import JobState
from workers.messages import CheckpointCheck, CheckpointRecord, GroupSpec, Incident


@dataclass(frozen=True)
class CreateGroup:
    spec: GroupSpec


@dataclass(frozen=True)
class EndGroup:
    """Ask the coordinator to end its ranks."""

    job_id: str
    attempt: int
    grace_s: float


@dataclass(frozen=True)
class RemoveGroup:
    """Remove all that Ray and the nodes still hold of the attempt."""

    job_id: str
    attempt: int


Action = CreateGroup | EndGroup | RemoveGroup


@dataclass(frozen=True)
class JobStep:
    """One decision about one job. ``job`` carries the version that was read; the store writes it as version + 1.

    ``changed`` is False when nothing needs saving (the actions may still be repeated: they are idempotent).
    """

    job: Job
    attempt: Attempt | None
    events: tuple[Event, ...] = ()
    incidents: tuple[Incident, ...] = ()  # upserted by (job, attempt, generation)
    checkpoints: tuple[CheckpointRecord, ...] = ()  # upserted by url
    pruned: tuple[str, ...] = ()  # urls whose rows go
    checks: tuple[CheckpointCheck, ...] = ()  # what reading checkpoints has shown, oldest first
    actions: tuple[Action, ...] = ()
    changed: bool = True

    @property
    def told_only(self) -> bool:
        """Nothing but the words with which a waiting job is shown, such as its place in the queue, which moves for all at once."""
        return self.changed and self.job.state is JobState.PENDING and not self.events and not self.actions


@dataclass(frozen=True)
class Plan:
    steps: tuple[JobStep, ...]
    look_again_at: float | None  # Unix seconds; None: when something changes
    sweep: tuple[RemoveGroup, ...] = ()  # strays
    broken: dict[str, str] = field(default_factory=dict)  # job id -> error: decided nothing about it, all others go on
