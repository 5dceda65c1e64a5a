"""The wire contract between control plane, coordinator, agents and ranks.

Plain frozen dataclasses of JSON values, so that a message means the same in a Ray call, in a file and in a row of SQL. Invariant: a
message never holds an object whose class lives outside this module and the standard library. ``SCHEMA`` changes when a field changes
its meaning; a reader refuses a schema newer than its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = 1


class StaleServer(Exception):
    """The order came from a server whose lease is over."""


class GroupPhase(StrEnum):
    """Where a group is in its life; written by the coordinator only."""

    PLACING = "PLACING"  # waits for its placement group and agents
    WARMING = "WARMING"  # agents answer, launchers import the framework
    STARTING = "STARTING"  # ranks of the first generation are launched, no step yet
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"  # a failure was seen; ends with the first new step (or first sign of life of a script without steps)
    ENDING = "ENDING"  # ranks got SIGTERM, grace runs
    ENDED = "ENDED"  # nothing of the group runs; outcome is set


class Outcome(StrEnum):
    """How a group ended."""

    SUCCEEDED = "SUCCEEDED"  # every rank ended with 0 by itself
    FAILED = "FAILED"  # a verdict: another attempt would not help
    LOST = "LOST"  # needs another placement
    STOPPED = "STOPPED"  # ended because it was asked to


class FailureClass(StrEnum):
    """Who is to blame for a failure, which decides the budget that pays for the restart."""

    USER = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    UNKNOWN = "unknown"


class RankState(StrEnum):
    LAUNCHED = "LAUNCHED"
    RUNNING = "RUNNING"  # finished its first step, or a script that reports none
    EXITED = "EXITED"


class RankPhase(StrEnum):
    """What a rank says that it is doing; each has its own limit for silence."""

    START = "start"
    RESTORE = "restore"
    COMPILE = "compile"
    STEP = "step"
    EVAL = "eval"
    SAVE = "save"
    DONE = "done"


class Source(StrEnum):
    """Where a generation took its state from."""

    MEMORY = "memory"
    PEER = "peer"
    STORAGE = "storage"
    NONE = "none"


@dataclass(frozen=True)
class NodePlace:
    """One node of an attempt: ``index`` counts from 0 within the group, ``node_id`` is Ray's."""

    index: int
    node_id: str


@dataclass(frozen=True)
class GroupSpec:
    """All that a coordinator must know to run an attempt; sent once, at its creation."""

    job_id: str
    attempt: int
    framework: str  # pytorch | tensorflow | jax | plain
    strategy: str | None
    command: tuple[str, ...]
    env: dict[str, str]
    nodes: tuple[NodePlace, ...]
    processes_per_node: int
    cpus_per_node: float
    gpus_per_node: int
    memory_gb: float
    devices_per_node: int | None
    bundle_url: str | None  # fsspec URL or path of the zip
    storage_url: str  # fsspec URL or path of the job's own folder
    every_steps: int | None
    every_seconds: float | None
    keep_last: int
    snapshot_every_steps: int | None  # None: auto
    max_user_errors: int
    max_infrastructure: int
    window_s: float
    start_s: float
    hang_s: float | None  # None: auto
    success_steps: int | None = None  # ranks that end with 0 before this step have not finished
    success_files: tuple[str, ...] = ()  # files that must be there at the end, relative to the working directory
    stop_on_nan: bool = False  # metrics that stay non-finite end the generation
    silence_s: float | None = None  # opt-in, for scripts that report no steps: no output and no CPU time for so long is a hang
    auto_checkpoints: bool = False  # beside the two above: at the interval that the measured cost and failures ask for
    first_generation: int = 0  # generations count on over attempts of a job
    prior_failures: tuple[Failure, ...] = ()  # of earlier attempts: budgets survive every restart
    prior_best_step: int | None = None
    committed_step: int = 0  # of the newest checkpoint that an earlier attempt committed; 0: none
    schema: int = SCHEMA

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return len(self.nodes) * self.processes_per_node

    @property
    def key(self) -> str:
        """Name of the group, from which all names in Ray and in /dev/shm are made."""
        return f"{self.job_id}.{self.attempt}"


@dataclass(frozen=True)
class Failure:
    """One failure that a budget paid for. ``signature`` is equal for equal causes at the same place; ``step`` is the best step then."""

    at: float  # Unix time, seconds
    kind: FailureClass
    cause: str
    signature: str
    step: int | None


@dataclass(frozen=True)
class ErrorReport:
    """A Python exception of a rank as text; never a pickled object."""

    type: str  # qualified name
    message: str
    traceback: str  # at most 16 KiB, the innermost end kept
    place: str  # "file.py:12 in function": innermost frame of the user's code
    ours: bool = False  # KeepStep's own, before the first line of the user's


@dataclass(frozen=True)
class RankReport:
    """One rank of the current generation."""

    rank: int
    node_index: int
    node_id: str
    local_rank: int
    generation: int
    pid: int | None
    state: RankState
    phase: RankPhase | None = None
    phase_at: float | None = None  # Unix time when the phase began
    step: int | None = None  # newest finished step
    step_at: float | None = None
    step_seconds: float | None = None  # median of the newest steps
    step_slowest: float | None = None  # longest time between two of the newest steps, announced phases not counted
    exit_code: int | None = None  # set when it ended by itself
    signal: int | None = None  # set when a signal ended it
    ours: bool = False  # we sent that signal
    launcher_lost: bool = False  # it went with its launcher
    attached: bool = False  # the script called workers.start(), so steps are expected of it
    os_state: str | None = None  # R S D T Z of /proc, while alive
    drill: str | None = None  # a drill made it end
    started_at: float | None = None
    ended_at: float | None = None
    restored: int | None = None  # step of the state that it took over; 0: started from nothing
    restored_at: float | None = None
    first_step_at: float | None = None  # of this generation
    new_step_at: float | None = None  # when it finished the first step that no earlier generation had finished
    failed_at: float | None = None  # its script ended with an exception; the process may still be on its way out
    error: ErrorReport | None = None
    nonfinite: tuple[tuple[str, int], ...] = ()  # metric and the first step of this generation at which it was NaN or infinite
    nonfinite_since: int | None = None  # first of at least three reports in a row, up to the newest, with such a metric
    oom_killed: str | None = None  # how it is known that the kernel killed for memory in its time, part of a sentence
    disk_full: str | None = None  # which of its folders had no room when it failed, part of a sentence
    tail: str = ""  # last log lines, once it ended other than with 0


@dataclass(frozen=True)
class Holding:
    """A complete snapshot of one rank in the shared memory of its node. A part is not valid when it was verified and does not hold:
    ``shared`` is what all ranks hold equal, so another node's replica can stand in for it; ``own`` is the rank's alone."""

    rank: int
    step: int
    generation: int
    slot: int
    pinned: bool
    bytes: int
    shared_valid: bool
    own_valid: bool
    problem: str | None = None

    @property
    def valid(self) -> bool:
        return self.shared_valid and self.own_valid


@dataclass(frozen=True)
class ProcessStack:
    """The Python stack of a process's main thread, innermost frame first, each as "function (file.py:12)"."""

    pid: int
    os_state: str | None  # R S D T Z of /proc
    frames: tuple[str, ...]
    place: str | None  # innermost frame of the user's own code


@dataclass(frozen=True)
class RankStacks:
    """The stacks of a rank and of the processes below it, taken from outside; ``text`` holds all threads, or why there is no stack."""

    rank: int
    own: ProcessStack
    children: tuple[ProcessStack, ...]
    text: str


@dataclass(frozen=True)
class Copy:
    """A part of a memory checkpoint: what one rank had at ``step``, in the memory of a node. ``whole``: with the arrays that all ranks
    share; else only what is the rank's own, held for a neighbour. Not verified before it is used."""

    rank: int
    step: int
    whole: bool


@dataclass(frozen=True)
class Fetch:
    """From which nodes a rank's snapshot can be made whole, the nearest first. ``own`` is empty where its own part is sound in its slot."""

    rank: int
    own: tuple[int, ...]
    shared: tuple[int, ...]


@dataclass(frozen=True)
class Offer:
    """A sound part of a snapshot that one agent can give to another: the file in its shared memory, and that file's header."""

    name: str
    header: bytes


@dataclass(frozen=True)
class SaveProgress:
    """A checkpoint that is being written: bytes that are there, and in all."""

    step: int
    bytes: int
    total_bytes: int


@dataclass(frozen=True)
class AgentStatus:
    """What an agent knows about its node. ``version`` grows with each change within an incarnation."""

    index: int
    incarnation: str  # new with every start of the agent's process
    version: int
    ready: bool  # launcher warm, working directory in place
    problem: str | None  # why it cannot be made ready
    generation: int  # newest generation launched here, -1 before
    stopped: bool  # no process of any rank lives here
    ranks: tuple[RankReport, ...]
    holdings: tuple[Holding, ...]  # surveyed and verified when stopped
    staged: dict[str, Problem | None]  # checkpoint url -> problem, None: ready to restore from
    pinned: dict[int, int]  # rank -> step of its pinned snapshot
    metrics: dict[str, float]
    stuck: tuple[int, ...] = ()  # pids that do not end on SIGKILL: the kernel has them
    at: float | None = None  # the clock of this node when this was told, Unix time
    silent: dict[int, float] = field(default_factory=dict)  # rank -> seconds since it last showed a step or phase, whatever clocks say
    quiet: dict[int, float] = field(default_factory=dict)  # rank -> seconds without log output and CPU time; where silence_s asks for it
    missing_files: tuple[str, ...] | None = None  # of success_files, once all ranks here have ended with 0
    stacks_of: float | None = None  # the request that ``stacks`` answers
    stacks: tuple[RankStacks, ...] = ()
    notes: tuple[tuple[int, str, str], ...] = ()  # (rank, reason, sentence) that the user should hear, oldest first
    copies: tuple[Copy, ...] = ()  # of memory checkpoints; told when stopped
    unfetched: dict[int, str] = field(default_factory=dict)  # step -> why this node's snapshots cannot be made whole from other nodes
    saving: SaveProgress | None = None  # this node's share of a checkpoint
    problem_kind: FailureClass = FailureClass.UNKNOWN  # whose the problem is, as far as one node can tell


@dataclass(frozen=True)
class RestoreOrder:
    """The state that a generation starts from, the same for every rank."""

    source: Source
    step: int
    url: str | None = None  # checkpoint, for source storage


@dataclass(frozen=True)
class LaunchOrder:
    """What an agent needs to launch its ranks of one generation. ``await_step``: the first step that would be new."""

    generation: int
    restore: RestoreOrder
    await_step: int
    master_address: str
    master_port: int
    agent_store: bool  # a store is served at that port; else rank 0 may bind it


class Unfit(StrEnum):
    """Why a checkpoint is not taken, the most certain first. Only DAMAGED tells something of its bytes."""

    DAMAGED = "damaged"  # its bytes do not hold: the one before it is taken
    UNSUITED = "unsuited"  # sound, but made by another number of ranks or a newer version
    NO_ROOM = "no_room"  # sound, but a node's shared memory cannot hold it; another node's may
    UNREADABLE = "unreadable"  # storage does not give it now
    UNWANTED = "unwanted"  # sound, but the job went back behind it: its metrics were not finite


@dataclass(frozen=True)
class Problem:
    """Of a checkpoint; ``text`` is a sentence."""

    why: Unfit
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class CheckpointFound:
    """An entry of the job's storage, newest first in a list. ``problem``: why it cannot be used."""

    url: str
    step: int
    problem: Problem | None = None
    finite: bool = True  # False: metrics had stayed NaN or infinite when it was taken


@dataclass(frozen=True)
class Incident:
    """One failure and its recovery. Times are Unix seconds; ``recovered_at`` is None while it lasts."""

    job_id: str
    attempt: int
    generation: int  # the generation that failed
    at: float  # when the failure happened, as near as we can know
    cause: str  # stable token: signal, exception, exit_code, early_exit, hang, agent_lost, node_lost, coordinator_lost, ...
    kind: FailureClass
    message: str  # one line: class, blamed rank and node, evidence, action
    action: str  # restart_in_place | relaunch | stop
    blamed_rank: int | None = None
    blamed_node: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    excerpt: str = ""  # last log lines or traceback of the blamed rank, at most 8 KiB
    stacks: dict[int, str] = field(default_factory=dict)  # of a hang: rank -> Python stacks before the end, within limits of size
    drill: str | None = None
    last_step: int | None = None
    resumed_step: int | None = None
    lost_steps: int | None = None
    restored_from: Source = Source.NONE
    phases_ms: dict[str, float] = field(default_factory=dict)  # detect, stop, launch, restore, first_step
    recovery_seconds: float | None = None  # to the first new step; of scripts that report none to the launch of all ranks
    recovered_at: float | None = None


@dataclass(frozen=True)
class GroupEvent:
    """Something worth telling the user. ``seq`` grows by one within an attempt, also over a coordinator's death."""

    seq: int
    at: float
    reason: str  # stable CamelCase token
    message: str
    generation: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """A committed checkpoint."""

    job_id: str
    attempt: int
    generation: int
    step: int
    url: str  # folder
    bytes: int
    files: int
    world_size: int
    committed_at: float
    write_seconds: float
    finite: bool = True  # False: metrics had stayed NaN or infinite when it was taken


@dataclass(frozen=True)
class CheckpointCheck:
    """The bytes of a checkpoint were read. ``problem``: what does not hold; None: all do."""

    url: str
    at: float
    problem: str | None


@dataclass(frozen=True)
class GroupReport:
    """What a coordinator knows about its group; idempotent to receive twice, ``version`` grows with each change."""

    job_id: str
    attempt: int
    version: int
    generation: int
    phase: GroupPhase
    reason: str  # stable token: why it is in this phase
    message: str
    ranks: tuple[RankReport, ...] = ()
    step: int | None = None  # newest step finished by every rank
    best_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # rank 0's newest
    failures: tuple[Failure, ...] = ()
    incidents: tuple[Incident, ...] = ()
    events: tuple[GroupEvent, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    pruned: tuple[str, ...] = ()  # urls of checkpoints that retention removed
    checks: tuple[CheckpointCheck, ...] = ()  # oldest first, those of earlier attempts' checkpoints too
    saving: SaveProgress | None = None  # all nodes together
    started_at: float | None = None  # first time RUNNING
    resumed_step: int | None = None  # step that the newest generation went on from, once it is known
    restored_from: Source = Source.NONE  # and where that state came from
    outcome: Outcome | None = None
    ended_at: float | None = None
    schema: int = SCHEMA


def check_schema(message: GroupSpec) -> None:
    """Raises ValueError for a message of a newer version, whose fields may mean something else."""
    if message.schema > SCHEMA:
        raise ValueError(f"message of schema {message.schema}, this version reads up to {SCHEMA}; upgrade KeepStep on this node")


def to_json(message: Any) -> dict[str, Any]:
    """A message as plain JSON values."""
    return asdict(message)
