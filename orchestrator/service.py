"""What people and programs can ask for. Writes intent only; the reconciler does the work.

Invariants: every verb is idempotent; a final job never changes; an error has a stable ``code``. Unavailable, KeyReused and BadCursor of
the store pass through.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from orchestrator.core.lifecycle import waiting_since
from orchestrator.core.model import Attempt, Checkpoint, Event, Job, Node
from orchestrator.core.scheduling import Placement, Waiting, rooms, schedule
from orchestrator.core.spec import JOB_ID, JobSpec
from orchestrator.core.states import AttemptState, Desired, JobState, Reason
from orchestrator.observer import Observer
from orchestrator.ports import Archive, Checkpoints, Clock, Conflict, Groups, Nodes, Store
from workers.messages import CheckpointCheck, Incident, RankReport

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_TRIES = 20  # against a reconciler that writes the same job at the same time
Fault = Literal["kill", "stop", "hang", "oom", "exit", "agent", "corrupt_checkpoint"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class NotFound(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Refused(Exception):
    """The state of things forbids it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Service:
    """``bundle_exists`` tells whether a bundle (sha256) was uploaded; ``stored`` reads checkpoints; ``folder_of``: URL of a job's folder;
    ``wake`` makes the reconciler look at once."""

    def __init__(
        self,
        store: Store,
        groups: Groups,
        nodes: Nodes,
        clock: Clock,
        wake: threading.Event,
        *,
        bundle_exists: Callable[[str], bool],
        stored: Checkpoints,
        folder_of: Callable[[Job], str],
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._store, self._groups, self._nodes, self._clock, self._wake = store, groups, nodes, clock, wake
        self._observer = Observer(store, groups, nodes)
        self._bundle_exists = bundle_exists
        self._stored = stored
        self._folder_of = folder_of
        self._new_id = new_id or new_job_id

    def submit(self, spec: JobSpec, idempotency_key: str | None, body_hash: str) -> tuple[Job, bool]:
        """The new job, or the one that the same key made before, and whether it is new. Raises Refused ``bundle_not_found``,
        ``storage_unusable``."""
        self._check_storage(spec)
        if spec.bundle is not None and not self._bundle_exists(spec.bundle):
            raise Refused("bundle_not_found", f"bundle: {spec.bundle} was not uploaded; PUT /api/v1/bundles/{spec.bundle} first")
        now = self._clock.now()
        job = Job(self._new_id(), spec.name, spec, JobState.PENDING, str(Reason.SUBMITTED), "waits for its first look", now)
        event = Event(job.id, now, str(Reason.SUBMITTED), f"submitted as {spec.name!r}")
        saved, created = self._store.add_job(job, event, idempotency_key, body_hash)
        self._wake.set()
        return saved, created

    def plan(self, spec: JobSpec) -> Placement | Waiting:
        """Where a job would be placed if it were submitted now, or why it would wait. Changes nothing.

        Raises Refused ``storage_unusable``.
        """
        self._check_storage(spec)
        world, now = self._observer.world(None), self._clock.now()
        new = Job("job-planned", spec.name, spec, JobState.PENDING, str(Reason.SUBMITTED), "", now)
        waiting = [job for job in world.jobs if job.state is JobState.PENDING and job.desired is Desired.RUN]
        since = {job.id: waiting_since(job, world.attempts.get(job.id)) for job in [*waiting, new]}
        free = None if world.nodes is None else rooms(world.nodes, world.attempts.values(), world.groups)
        return schedule([*waiting, new], since, free, now)[new.id]

    def job(self, ref: str) -> Job:
        """By id, or the newest job of that name, an active one first. Raises NotFound ``job_not_found``."""
        job = self._store.job(ref)
        if job is None:
            raise NotFound("job_not_found", f"no job has the id or name {ref!r}; `keepstep ls` lists them")
        return job

    def jobs(self, state: str | None, labels: dict[str, str], limit: int, cursor: str | None) -> tuple[list[Job], str | None]:
        """Newest first."""
        return self._store.jobs(state, labels, limit, cursor)

    def cancel(self, ref: str, grace_s: float | None = None) -> Job:
        """Asks for the end of a job; asked again, only a shorter grace changes anything.

        Raises NotFound, Refused ``job_is_final`` (SUCCEEDED, FAILED) or ``ambiguous_name``.
        """
        for _ in range(_TRIES):
            job = self._one(ref)
            asked = job.desired is Desired.CANCEL
            known_s = job.grace_s if job.grace_s is not None else job.spec.timeouts.grace_s
            if job.state is JobState.CANCELLED or (asked and not job.state.final and (grace_s is None or grace_s >= known_s)):
                return job
            if job.state.final:
                raise Refused("job_is_final", f"job {job.id} is {job.state}; there is nothing to cancel")
            wanted = replace(job, desired=Desired.CANCEL, grace_s=grace_s)
            text = f"a user asked to end the job sooner: grace {grace_s:g} s" if asked else "a user asked to cancel the job"
            event = Event(job.id, self._clock.now(), "CancelAsked", text, attempt=job.attempt or None)
            try:
                saved = self._store.save_intent(wanted, event)
            except Conflict:
                continue
            self._wake.set()
            return saved
        raise Conflict(f"job {ref} changed all the time")

    def delete(self, job_id: str) -> None:
        """Removes an ended job with its checkpoints, logs and history. Storage goes first: what a failure leaves can be deleted again.

        Raises NotFound, Refused ``id_needed``, ``job_not_final``, ``job_not_removed``, ``checkpoint_pinned``.
        """
        if not JOB_ID.fullmatch(job_id):
            raise Refused("id_needed", f"{job_id!r} is no job id; what cannot be undone takes an id, `keepstep ls` shows it")
        job = self.job(job_id)
        if not job.state.final:
            raise Refused("job_not_final", f"job {job.id} is {job.state}; cancel it first")
        attempts = self._store.attempts(job.id)
        if attempts and attempts[-1].state is not AttemptState.ENDED:
            raise Refused(
                "job_not_removed", f"something of attempt {attempts[-1].number} of job {job.id} is still being removed; try again soon"
            )
        if steps := self._store.pinned(job.id):
            raise Refused(
                "checkpoint_pinned", f"job {job.id} has pinned checkpoints (steps {', '.join(map(str, steps))}); unpin them first"
            )
        self._stored.remove_folder(self._folder_of(job))
        self._store.delete_job(job.id)

    def attempts(self, ref: str) -> list[Attempt]:
        """In order."""
        return self._store.attempts(self.job(ref).id)

    def ranks(self, ref: str) -> list[RankReport]:
        """Of the newest attempt, by rank."""
        attempts = self.attempts(ref)
        return sorted(attempts[-1].ranks, key=lambda report: report.rank) if attempts else []

    def incidents(self, ref: str, limit: int, cursor: str | None) -> tuple[list[Incident], str | None]:
        return self._store.incidents(self.job(ref).id, limit, cursor)

    def events(self, ref: str, limit: int, cursor: str | None) -> tuple[list[Event], str | None]:
        return self._store.events(self.job(ref).id, limit, cursor)

    def events_after(self, job_id: str, event_id: int, limit: int) -> list[Event]:
        """At most ``limit`` with a higher id, oldest first."""
        return self._store.events_after(job_id, event_id, limit)

    def checkpoints(self, ref: str, limit: int, cursor: str | None) -> tuple[list[Checkpoint], str | None]:
        return self._store.checkpoints(self.job(ref).id, limit, cursor)

    def checkpoint(self, ref: str, step: int) -> Checkpoint:
        """The newest of that step. Raises NotFound ``job_not_found``, ``checkpoint_not_found``."""
        job = self.job(ref)
        found = self._store.checkpoint(job.id, step)
        if found is None:
            raise NotFound("checkpoint_not_found", f"job {job.id} has no checkpoint of step {step}; `keepstep checkpoints` lists them")
        return found

    def verify_checkpoint(self, ref: str, step: int) -> Checkpoint:
        """Reads every byte of it and keeps what that has shown. Raises NotFound."""
        known = self.checkpoint(ref, step)
        problem = self._stored.verify(known.url)
        self._store.save_check(known.job_id, CheckpointCheck(known.url, self._clock.now(), problem))
        if problem is not None and known.problem is None:
            text = f"step {step}: {known.url} does not read back: {problem}"
            self._note(self.job(known.job_id), Event(known.job_id, self._clock.now(), "CheckpointInvalid", text))
        return self.checkpoint(known.job_id, step)

    def pin_checkpoint(self, ref: str, step: int, pinned: bool) -> Checkpoint:
        """Keeps it from retention, or no longer; idempotent. Raises NotFound."""
        known = self.checkpoint(ref, step)
        if pinned and not self._stored.pin(known.url):
            raise NotFound("checkpoint_not_found", f"the checkpoint of step {step} is no longer in storage; retention has removed it")
        if not pinned:
            self._stored.unpin(known.url)
        if pinned != (known.pinned_at is not None):
            now = self._clock.now()
            self._store.save_pin(known.job_id, known.url, now if pinned else None)
            told = "is kept until it is unpinned" if pinned else "is no longer pinned"
            event = Event(known.job_id, now, "CheckpointPinned" if pinned else "CheckpointUnpinned", f"step {step} {told}")
            self._note(self.job(known.job_id), event)
        return self.checkpoint(known.job_id, step)

    def checkpoint_archive(self, ref: str, step: int) -> tuple[Checkpoint, Archive]:
        """All of a checkpoint as a tar. Raises NotFound, Refused ``checkpoint_damaged``."""
        known = self.checkpoint(ref, step)
        try:
            return known, self._stored.archive(known.url)
        except ValueError as error:
            raise Refused("checkpoint_damaged", f"the checkpoint of step {step} cannot be read: {error}") from error

    def drill(self, ref: str, fault: str, rank: int) -> str:
        """Injects a real fault into a running job; a sentence tells what was done.

        Raises NotFound, Refused ``unknown_fault``, ``job_not_running``, ``rank_out_of_range``, ``drill_not_possible``, ``ambiguous_name``.
        """
        job = self._one(ref)
        if fault not in FAULTS:
            raise Refused("unknown_fault", f"fault: {fault!r} is not known; use one of {', '.join(FAULTS)}")
        if job.state is not JobState.RUNNING or job.desired is not Desired.RUN:
            raise Refused("job_not_running", f"job {job.id} is {job.state}; a drill needs a job that is RUNNING")
        world_size = job.spec.resources.world_size
        if not 0 <= rank < world_size:
            raise Refused("rank_out_of_range", f"rank: job {job.id} has ranks 0 to {world_size - 1}, not {rank}")
        try:
            told = self._groups.drill(job.id, job.attempt, fault, rank)
        except ValueError as error:
            raise Refused("drill_not_possible", str(error)) from error
        self._note(job, Event(job.id, self._clock.now(), "DrillInjected", told, attempt=job.attempt, rank=rank))
        self._wake.set()
        return told

    def nodes(self) -> tuple[Node, ...]:
        """Raises Unavailable when the cluster does not answer."""
        return self._nodes.nodes()

    def _note(self, job: Job, event: Event) -> None:
        """Adds an event to a job that may change meanwhile."""
        for _ in range(_TRIES):
            try:
                self._store.save_intent(job, event)
            except Conflict:
                job = self.job(job.id)
            else:
                return

    def _check_storage(self, spec: JobSpec) -> None:
        problem = self._stored.unusable(spec.checkpoint.storage) if spec.checkpoint.storage is not None else None
        if problem is not None:
            raise Refused("storage_unusable", problem)

    def _one(self, ref: str) -> Job:
        """The job that a verb means; a name must not be shared by several that are active."""
        active = [] if JOB_ID.fullmatch(ref) else self._store.active(ref)
        if len(active) > 1:
            ids = ", ".join(job.id for job in active)
            raise Refused("ambiguous_name", f"several active jobs are called {ref!r}: {ids}; use an id")
        return active[0] if active else self.job(ref)


def new_job_id() -> str:
    """``job-`` and 12 random letters of base32: 60 bits."""
    return "job-" + "".join(secrets.choice(_ALPHABET) for _ in range(12))
