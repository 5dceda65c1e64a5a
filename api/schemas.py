"""What the API answers: one model for each kind of thing, made from the values of the core.

Invariants: times are ISO 8601 in UTC with Z; a value that JSON cannot hold (NaN, infinity) comes as a string; fields are never renamed,
only added.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, Field

from orchestrator.core import model
from orchestrator.core.scheduling import Placement, Waiting
from orchestrator.core.spec import dump
from orchestrator.core.states import AttemptState, JobState, Reason
from orchestrator.core.verdicts import budgets
from workers import messages
from workers.messages import FailureClass, Outcome, RankPhase, RankState, Source

Item = TypeVar("Item")
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-01-31T12:00:00.123Z"])]


def utc(at: float) -> str:
    """A Unix time in seconds as ISO 8601 with milliseconds and Z."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_or_none(at: float | None) -> str | None:
    return None if at is None else utc(at)


class Page(BaseModel, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None = Field(None, description="Give it as `cursor` to get the next page; null: there is none.")


class BudgetOut(BaseModel):
    """Failures within the window, and how many of them may be followed by a restart."""

    used: int
    limit: int


class CheckpointProgress(BaseModel):
    """A checkpoint that is being written."""

    step: int
    bytes: int = Field(description="Written so far, on all nodes.")
    total_bytes: int

    @classmethod
    def of(cls, job: model.Job) -> CheckpointProgress | None:
        saving = job.saving
        if saving is None or job.state not in (JobState.RUNNING, JobState.RECOVERING):
            return None
        return cls(step=saving.step, bytes=saving.bytes, total_bytes=saving.total_bytes)


class JobOut(BaseModel):
    """A job."""

    id: str
    name: str
    state: JobState
    reason: str = Field(description="Stable token that says why the job is in its state.")
    message: str = Field(description="The reason in a sentence.")
    spec: dict[str, Any] = Field(description="The job spec as accepted, with defaults.")
    priority: int
    labels: dict[str, str]
    attempt: int = Field(description="Number of the newest attempt; 0 before the first.")
    generation: int = Field(description="Newest generation that was started, over all attempts; -1 before the first.")
    step: int | None = Field(description="Newest step that every rank finished.")
    best_step: int | None = Field(description="Highest step that any rank has finished.")
    metrics: dict[str, float | str] = Field(description="Rank 0's newest; NaN and infinity as strings.")
    restarts: int = Field(description="Starts of all ranks beyond the first, over all attempts.")
    budgets: dict[FailureClass, BudgetOut] = Field(description="By the class of failure that pays; `unknown` draws on infrastructure.")
    world_size: int
    created_at: Time
    started_at: Time | None
    ended_at: Time | None
    unreachable_since: Time | None = Field(description="Since when the job's group has not answered.")
    checkpoint_progress: CheckpointProgress | None = Field(description="The checkpoint that is being written now; null: none is.")

    @classmethod
    def of(cls, job: model.Job, now: float) -> JobOut:
        return cls(
            id=job.id, name=job.name, state=job.state, reason=job.reason, message=job.message, spec=dump(job.spec),
            priority=job.spec.priority, labels=job.spec.labels, attempt=job.attempt, generation=job.generation, step=job.step,
            best_step=job.best_step, metrics={name: _number(value) for name, value in job.metrics.items()}, restarts=job.restarts,
            budgets={kind: BudgetOut(used=used, limit=limit) for kind, (used, limit) in budgets(job, now).items()},
            world_size=job.spec.resources.world_size, created_at=utc(job.created_at), started_at=utc_or_none(job.started_at),
            ended_at=utc_or_none(job.ended_at), unreachable_since=utc_or_none(job.unreachable_since),
            checkpoint_progress=CheckpointProgress.of(job),
        )  # fmt: skip


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class NodeRef(BaseModel):
    """A node of an attempt."""

    index: int
    node_id: str


class AttemptOut(BaseModel):
    """One placement of a job on nodes."""

    attempt: int
    state: AttemptState
    outcome: Outcome | None
    reason: str
    message: str
    nodes: list[NodeRef]
    generation: int
    created_at: Time
    started_at: Time | None
    ended_at: Time | None

    @classmethod
    def of(cls, attempt: model.Attempt) -> AttemptOut:
        return cls(
            attempt=attempt.number, state=attempt.state, outcome=attempt.outcome, reason=attempt.reason, message=attempt.message,
            nodes=[NodeRef(index=node.index, node_id=node.node_id) for node in attempt.nodes], generation=attempt.generation,
            created_at=utc(attempt.created_at), started_at=utc_or_none(attempt.started_at), ended_at=utc_or_none(attempt.ended_at),
        )  # fmt: skip


class RankOut(BaseModel):
    """One training process of the newest attempt."""

    rank: int
    local_rank: int
    node_index: int
    node_id: str
    generation: int
    pid: int | None = Field(description="Process id on its node.")
    state: RankState
    phase: RankPhase | None
    phase_at: Time | None
    step: int | None
    step_at: Time | None
    step_seconds: float | None = Field(description="Median of the newest steps, seconds.")
    exit_code: int | None
    signal: int | None
    started_at: Time | None
    ended_at: Time | None
    error: dict[str, str] | None = Field(description="Python exception: type, message, traceback, place.")

    @classmethod
    def of(cls, rank: messages.RankReport) -> RankOut:
        return cls(
            rank=rank.rank, local_rank=rank.local_rank, node_index=rank.node_index, node_id=rank.node_id, generation=rank.generation,
            pid=rank.pid, state=rank.state, phase=rank.phase, phase_at=utc_or_none(rank.phase_at), step=rank.step,
            step_at=utc_or_none(rank.step_at), step_seconds=rank.step_seconds, exit_code=rank.exit_code, signal=rank.signal,
            started_at=utc_or_none(rank.started_at), ended_at=utc_or_none(rank.ended_at),
            error=None if rank.error is None else {name: getattr(rank.error, name) for name in ("type", "message", "traceback", "place")},
        )  # fmt: skip


class IncidentOut(BaseModel):
    """One failure and its recovery."""

    attempt: int
    generation: int = Field(description="The generation that failed.")
    at: Time
    cause: str = Field(description="Stable token: signal, oom_killed, exception, exit_code, disk_full, hang, agent_lost, node_lost, ...")
    kind: FailureClass = Field(alias="class", description="Who is to blame; decides the budget that paid.")  # "class" is no name in Python
    message: str
    action: str = Field(description="restart_in_place, relaunch or stop.")
    blamed_rank: int | None
    blamed_node: str | None
    exit_code: int | None
    signal: int | None
    excerpt: str = Field(description="Last log lines or traceback of the blamed rank; of a hang its Python stack.")
    stacks: dict[int, str] = Field(
        description="Of a hang: Python stacks of the ranks and of the processes below them just before they were ended, by rank."
    )
    drill: str | None = Field(description="The drill that made it, if one did.")
    last_step: int | None
    resumed_step: int | None
    lost_steps: int | None = Field(description="Finished steps that had to be done again.")
    restored_from: Source
    phases_ms: dict[str, float] = Field(description="Milliseconds of detect, stop, launch, restore, first_step.")
    recovery_seconds: float | None = Field(
        description="From the failure to the first step that is new on all ranks; of a script that reports no steps only to the launch of "
        "all ranks, for when it trains again is not known. Null while it lasts."
    )
    recovered_at: Time | None

    @classmethod
    def of(cls, incident: messages.Incident) -> IncidentOut:
        times = {"at": utc(incident.at), "recovered_at": utc_or_none(incident.recovered_at)}
        return cls.model_validate(messages.to_json(incident) | times | {"class": incident.kind})


class EventOut(BaseModel):
    """One line of a job's history."""

    id: int | None
    at: Time
    reason: str = Field(description="Stable token.")
    message: str
    source: str
    attempt: int | None
    generation: int | None
    rank: int | None

    @classmethod
    def of(cls, event: model.Event) -> EventOut:
        return cls(
            id=event.id, at=utc(event.at), reason=event.reason, message=event.message, source=event.source, attempt=event.attempt,
            generation=event.generation, rank=event.rank,
        )  # fmt: skip


class CheckpointOut(BaseModel):
    """A committed checkpoint."""

    step: int
    attempt: int
    generation: int
    url: str
    bytes: int
    files: int
    world_size: int
    committed_at: Time
    write_seconds: float
    verified_at: Time | None = Field(description="When its bytes were last read back; null: not yet.")
    problem: str | None = Field(description="What did not hold then; null: every byte did, or it was not read yet.")
    pinned: bool = Field(description="True: retention leaves it alone.")
    finite: bool = Field(description="False: metrics had stayed NaN or infinite for three reports in a row when it was taken.")

    @classmethod
    def of(cls, record: model.Checkpoint) -> CheckpointOut:
        return cls(
            step=record.step, attempt=record.attempt, generation=record.generation, url=record.url, bytes=record.bytes,
            files=record.files, world_size=record.world_size, committed_at=utc(record.committed_at), write_seconds=record.write_seconds,
            verified_at=utc_or_none(record.verified_at), problem=record.problem, pinned=record.pinned_at is not None,
            finite=record.finite,
        )  # fmt: skip


class PlanOut(BaseModel):
    """What would happen to a job that was submitted now."""

    fits: bool = Field(description="True: it would start at once, on `nodes`.")
    reason: str = Field(description="Stable token.")
    message: str
    nodes: list[NodeRef]

    @classmethod
    def of(cls, answer: Placement | Waiting) -> PlanOut:
        if isinstance(answer, Waiting):
            return cls(fits=False, reason=answer.reason, message=answer.message, nodes=[])
        nodes = [NodeRef(index=place.index, node_id=place.node_id) for place in answer.nodes]
        return cls(
            fits=True,
            reason=Reason.PLACED,
            message=f"would start at once on {len(nodes)} node{'' if len(nodes) == 1 else 's'}",
            nodes=nodes,
        )


class NodeOut(BaseModel):
    """A machine of the cluster."""

    id: str
    name: str
    address: str
    state: model.NodeState
    head: bool
    cpus: float
    gpus: int
    memory_gb: float
    free_cpus: float
    free_gpus: float
    free_memory_gb: float
    conditions: list[str]
    labels: dict[str, str]

    @classmethod
    def of(cls, node: model.Node) -> NodeOut:
        return cls(
            id=node.id, name=node.name, address=node.address, state=node.state, head=node.head, cpus=node.cpus, gpus=node.gpus,
            memory_gb=node.memory_gb, free_cpus=node.free_cpus, free_gpus=node.free_gpus, free_memory_gb=node.free_memory_gb,
            conditions=list(node.conditions), labels=node.labels,
        )  # fmt: skip
