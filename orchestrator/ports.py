"""What the control loop needs from the outside, as protocols. Adapters implement them; the simulation implements Groups and Nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.core.actions import JobStep
from orchestrator.core.figures import Figures
from orchestrator.core.lease import Lease
from orchestrator.core.model import Attempt, Checkpoint, Event, GroupView, Job, Node
from workers.messages import CheckpointCheck, GroupSpec, Incident


class Conflict(Exception):
    """A guarded write found another version: read again and decide anew."""


class Unavailable(Exception):
    """The other side (Ray, database) did not answer; nothing is known about the effect."""


class BadCursor(ValueError):
    """A cursor that no list gave out, or another list."""


class LeaseLost(Exception):
    """Another server leads: what this one decided must not be done."""


class Clock(Protocol):
    def now(self) -> float:
        """Unix time in seconds."""
        ...


class Groups(Protocol):
    """Groups of Ray actors. Every call is idempotent and named by (job id, attempt). Raises Unavailable when Ray does not answer, and
    LeaseLost where a coordinator has heard of a higher ``fence``."""

    def observe(self, keys: Sequence[tuple[str, int]], fence: int | None) -> dict[tuple[str, int], GroupView]:
        """``fence``: of the server that leads, which the coordinators follow from then on; None: only a look."""
        ...

    def existing(self) -> set[tuple[str, int]]:
        """All groups of which Ray still has a coordinator, agent or placement group, whoever asked for them."""
        ...

    def create(self, spec: GroupSpec, fence: int) -> None:
        """Make placement group and coordinator if they do not exist; returns before they are ready."""
        ...

    def end(self, job_id: str, attempt: int, grace_s: float, fence: int) -> None:
        """Ask the coordinator to end its ranks: SIGTERM, then SIGKILL after ``grace_s``. No-op when there is none."""
        ...

    def remove(self, job_id: str, attempt: int, fence: int) -> bool:
        """Remove actors, placement group and shared memory. True when nothing of the group is left; call again otherwise."""
        ...

    def drill(self, job_id: str, attempt: int, fault: str, rank: int) -> str:
        """Inject a real fault; returns a sentence that says what was done. Raises ValueError when it cannot be done now."""
        ...


@dataclass(frozen=True)
class Archive:
    """A tar of ``size`` bytes, verified while it is taken: ``chunks`` raises OSError where a byte does not hold."""

    size: int
    chunks: Iterator[bytes]


class Checkpoints(Protocol):
    """Checkpoints in storage, by url. Raises Unavailable where storage does not answer, or is asked for too much at once."""

    def unusable(self, url: str) -> str | None:
        """Why no folder can be at ``url``, with the remedy; None: nothing that this server knows speaks against it."""
        ...

    def verify(self, url: str) -> str | None:
        """Read every byte; None when all hold, else the problem as a sentence."""
        ...

    def pin(self, url: str) -> bool:
        """Keep it from retention; False where there is none any more."""
        ...

    def unpin(self, url: str) -> None: ...

    def archive(self, url: str) -> Archive:
        """All of it. Raises ValueError where its manifest cannot be read."""
        ...

    def remove_folder(self, url: str) -> None:
        """A job's folder with everything in it: checkpoints, logs, working directory. One that is gone is fine."""
        ...


class Nodes(Protocol):
    def nodes(self) -> tuple[Node, ...]:
        """Alive and lately lost nodes. Raises Unavailable."""
        ...


class Store(Protocol):
    """Jobs in SQL. Every method is one transaction. Raises Unavailable when the database does not answer."""

    # intent: written by the service
    def add_job(self, job: Job, event: Event, idempotency_key: str | None, body_hash: str) -> tuple[Job, bool]:
        """Insert; (job, True). With a known key: (the same job, False), or KeyReused when ``body_hash`` differs."""
        ...

    def save_intent(self, job: Job, event: Event) -> Job:
        """Write ``desired`` and ``grace_s`` guarded by ``job.version``; returns the job with its new version. Raises Conflict."""
        ...

    # status: written by the reconciler
    def save_step(self, step: JobStep, fence: int) -> Job:
        """Save one decision: job guarded by version, attempt, events, incidents, checkpoints. Raises Conflict, LeaseLost."""
        ...

    def save_told(self, jobs: Sequence[Job], fence: int) -> None:
        """Reason and message of jobs that wait; one that changed meanwhile is left out."""
        ...

    # reads
    def open_jobs(self) -> tuple[list[Job], dict[str, Attempt]]:
        """Jobs that are not final or whose newest attempt is not ENDED, with their newest attempts by job id."""
        ...

    def job(self, ref: str) -> Job | None:
        """By id, else the newest job with that name, an active one first."""
        ...

    def active(self, name: str) -> list[Job]:
        """Jobs of that name that are not final, newest first; at most 20."""
        ...

    def jobs(self, state: str | None, labels: dict[str, str], limit: int, after: str | None) -> tuple[list[Job], str | None]:
        """Newest first; ``after`` is an opaque cursor; returns (page, next cursor)."""
        ...

    def attempts(self, job_id: str) -> list[Attempt]: ...

    def incidents(self, job_id: str, limit: int, after: str | None) -> tuple[list[Incident], str | None]: ...

    def events(self, job_id: str, limit: int, after: str | None) -> tuple[list[Event], str | None]: ...

    def events_after(self, job_id: str, event_id: int, limit: int) -> list[Event]:
        """At most ``limit`` with a higher id, oldest first."""
        ...

    def checkpoints(self, job_id: str, limit: int, after: str | None) -> tuple[list[Checkpoint], str | None]: ...

    def checkpoint(self, job_id: str, step: int) -> Checkpoint | None:
        """The newest of that step."""
        ...

    def save_check(self, job_id: str, check: CheckpointCheck) -> None:
        """What reading a checkpoint has shown; an older reading than the one that is known changes nothing."""
        ...

    def pinned(self, job_id: str) -> list[int]:
        """Steps of its pinned checkpoints."""
        ...

    def delete_job(self, job_id: str) -> None:
        """The job with all that belongs to it; one that is gone is fine."""
        ...

    def save_pin(self, job_id: str, url: str, at: float | None) -> None:
        """Since when (Unix seconds) a checkpoint is pinned; None: it is not."""
        ...

    def figures(self) -> Figures:
        """Counts over all jobs."""
        ...

    def ping(self) -> None:
        """Raises Unavailable."""
        ...


class Leases(Protocol):
    """The lease of the reconciler that leads, in the database of all servers. Raises Unavailable."""

    def lease(self) -> Lease: ...

    def take(self, known: Lease, holder: str, cluster: str) -> Lease | None:
        """With the next fence; None where it is not as ``known`` any more."""
        ...

    def renew(self, lease: Lease, passed_at: float | None) -> Lease | None:
        """None where another one took it."""
        ...

    def release(self, fence: int) -> None:
        """Nobody leads from now on; nothing where another one took it."""
        ...


class KeyReused(Exception):
    """An idempotency key came with another body."""
