"""What the control plane knows about jobs, attempts and nodes. PURE values; the store maps them to rows one to one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.core.spec import JobSpec
from orchestrator.core.states import AttemptState, Desired, JobState
from workers.messages import CheckpointRecord, Failure, GroupReport, Incident, NodePlace, Outcome, RankReport, SaveProgress


@dataclass(frozen=True)
class Job:
    """A job row. The service writes ``desired`` and ``grace_s``; the reconciler writes all else after creation. ``version`` guards both.

    Times are Unix seconds (UTC). ``attempt`` is the number of the newest attempt, 0 before the first.
    """

    id: str
    name: str
    spec: JobSpec
    state: JobState
    reason: str
    message: str
    created_at: float
    version: int = 1
    desired: Desired = Desired.RUN
    grace_s: float | None = None  # from the cancel request; None: the spec's
    attempt: int = 0
    generation: int = -1  # newest generation started, over all attempts
    step: int | None = None
    best_step: int | None = None
    checkpoint_step: int | None = None  # of the newest checkpoint that was committed
    metrics: dict[str, float] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()  # what the budgets have paid, newest last
    restarts: int = 0  # how often ranks were started again, over all attempts
    stalled: int = 0  # attempts lost in a row without a new best step
    open_incidents: tuple[Incident, ...] = ()  # oldest first; those that an attempt left open are closed by the next one that trains
    unreachable_since: float | None = None
    started_at: float | None = None  # first time RUNNING
    ended_at: float | None = None
    saving: SaveProgress | None = None  # the checkpoint that is being written
    look_again_at: float | None = None  # when the reconciler must decide anew even if nothing changes


@dataclass(frozen=True)
class Attempt:
    """One placement of a job. ``ranks`` is the newest report of each rank."""

    job_id: str
    number: int
    state: AttemptState
    nodes: tuple[NodePlace, ...]
    cpus_per_node: float
    gpus_per_node: int
    memory_gb: float
    created_at: float
    first_generation: int = 0
    generation: int = -1
    report_version: int = 0  # newest coordinator report that was saved
    events_seen: int = 0  # number of its newest event that was saved
    checkpoints_seen: float | None = None  # when its newest checkpoint that was saved was committed
    checks_seen: float | None = None  # when its newest check of a checkpoint that was saved was made
    prior_best_step: int | None = None  # the job's best step when this attempt was made
    absent_since: float | None = None  # first of the newest observations in a row that found nothing of it
    ending_since: float | None = None  # when it was first told to end
    ranks: tuple[RankReport, ...] = ()
    outcome: Outcome | None = None
    reason: str = ""
    message: str = ""
    started_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class Checkpoint(CheckpointRecord):
    """A committed checkpoint with what has become known of it since."""

    verified_at: float | None = None  # when its bytes were last read
    problem: str | None = None  # what did not hold then; None: all did
    pinned_at: float | None = None  # since when retention leaves it alone


@dataclass(frozen=True)
class Event:
    """One line of a job's history. ``source`` + ``source_seq`` make a doubled report harmless: ("control", n) or ("attempt-2", n)."""

    job_id: str
    at: float
    reason: str
    message: str
    source: str = "control"
    source_seq: int | None = None
    attempt: int | None = None
    generation: int | None = None
    rank: int | None = None
    id: int | None = None  # given by the store, grows


class NodeState(StrEnum):
    READY = "READY"
    CORDONED = "CORDONED"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    QUARANTINED = "QUARANTINED"
    UNREACHABLE = "UNREACHABLE"


@dataclass(frozen=True)
class Node:
    """A machine as Ray sees it. ``free_*`` is what Ray has not given away."""

    id: str  # Ray node id, hex
    name: str
    address: str
    state: NodeState
    cpus: float
    gpus: int
    memory_gb: float
    free_cpus: float
    free_gpus: float
    free_memory_gb: float
    head: bool = False
    conditions: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)


class Presence(StrEnum):
    """What can be seen of a group in Ray."""

    ABSENT = "ABSENT"  # Ray answered: neither coordinator nor placement group of that name
    PRESENT = "PRESENT"  # its coordinator answered with a report
    SILENT = "SILENT"  # something of it exists, its coordinator did not answer in time
    UNKNOWN = "UNKNOWN"  # Ray itself did not answer: says nothing about the group


@dataclass(frozen=True)
class GroupView:
    """One observation of one group. ``report`` is set when PRESENT."""

    presence: Presence
    report: GroupReport | None = None


@dataclass(frozen=True)
class World:
    """Everything that a plan is made from, read before deciding."""

    jobs: tuple[Job, ...]  # all that are not final, and final ones whose attempt is not ENDED
    attempts: dict[str, Attempt]  # newest attempt by job id
    groups: dict[tuple[str, int], GroupView]  # by (job id, attempt number)
    nodes: tuple[Node, ...] | None  # None: Ray did not answer
    removed: frozenset[tuple[str, int]] = frozenset()  # groups whose removal was complete before this observation
    removal_problems: dict[tuple[str, int], str] = field(default_factory=dict)  # why the newest try to remove a group failed
    strays: frozenset[tuple[str, int]] = frozenset()  # groups seen in Ray whose attempt is ENDED: a late call made them anew
