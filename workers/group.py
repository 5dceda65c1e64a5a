"""PURE: the state of a group as its coordinator keeps it, and the vocabulary of decisions about it.

The coordinator saves a Group with its agents before it acts on it, so that a restarted coordinator goes on where the last one was.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from workers.messages import (
    AgentStatus,
    CheckpointCheck,
    CheckpointFound,
    CheckpointRecord,
    Failure,
    Fetch,
    GroupEvent,
    GroupPhase,
    GroupSpec,
    Incident,
    Outcome,
    RankReport,
    RestoreOrder,
)

AGENT_LOST_S = 3.0  # heartbeats missed for this long: the agent is gone
AGENT_PAUSED_S = 15.0  # but so long where Ray knows of no death: its ranks train on while it pauses
AGENT_RETURN_S = 45.0  # the coordinator makes a new agent within this time, else its node counts as lost
REPEAT_S = 1.0  # how often an action is repeated until its effect is seen
KEPT_EVENTS = 200
KEPT_RECORDS = 200  # of checkpoints
KEPT_INCIDENTS = 50


class Doing(StrEnum):
    """What the coordinator is at; finer than GroupPhase."""

    PLACING = "PLACING"  # agents do not answer yet
    WARMING = "WARMING"  # launchers import, working directories are unpacked
    LOCATING = "LOCATING"  # which state to start from
    STAGING = "STAGING"  # agents read and verify a checkpoint
    FETCHING = "FETCHING"  # agents make their snapshots whole from each other's
    LAUNCHING = "LAUNCHING"
    TRAINING = "TRAINING"
    STOPPING = "STOPPING"  # a failure was judged, ranks are being ended, a new generation follows
    FINISHING = "FINISHING"  # all ranks ended with 0; the final checkpoint is written
    ENDING = "ENDING"  # asked to end: SIGTERM was sent, grace runs
    CLOSING = "CLOSING"  # whatever is left is being ended, the outcome is known
    ENDED = "ENDED"


# Phase shown while the first generation starts, and while a later one does; reason and message.
SHOWN: dict[Doing, tuple[GroupPhase, GroupPhase, str, str]] = {
    Doing.PLACING: (GroupPhase.PLACING, GroupPhase.RECOVERING, "WaitingForAgents", "the agents of its nodes are being started"),
    Doing.WARMING: (GroupPhase.WARMING, GroupPhase.RECOVERING, "Warming", "launchers import the framework"),
    Doing.LOCATING: (GroupPhase.STARTING, GroupPhase.RECOVERING, "LocatingState", "looking for the newest valid state"),
    Doing.STAGING: (GroupPhase.STARTING, GroupPhase.RECOVERING, "ReadingCheckpoint", "the nodes read and verify a checkpoint"),
    Doing.FETCHING: (GroupPhase.STARTING, GroupPhase.RECOVERING, "FetchingFromPeers", "the nodes fetch state from each other's memory"),
    Doing.LAUNCHING: (GroupPhase.STARTING, GroupPhase.RECOVERING, "Launching", "ranks are being forked"),
    Doing.STOPPING: (GroupPhase.RECOVERING, GroupPhase.RECOVERING, "StoppingRanks", "the ranks of the failed generation are being ended"),
    Doing.FINISHING: (
        GroupPhase.RUNNING,
        GroupPhase.RUNNING,
        "WritingFinalCheckpoint",
        "all ranks ended with 0; the last state is being saved",
    ),
    Doing.ENDING: (GroupPhase.ENDING, GroupPhase.ENDING, "GraceRunning", "ranks have SIGTERM and may save"),
    Doing.CLOSING: (GroupPhase.ENDING, GroupPhase.ENDING, "StoppingRanks", "what is left of the ranks is being ended"),
    Doing.ENDED: (GroupPhase.ENDED, GroupPhase.ENDED, "Ended", "nothing of the group runs"),
}


@dataclass(frozen=True)
class EndRequest:
    at: float
    grace_s: float


@dataclass(frozen=True)
class Recovery:
    """The open incident with the times of its phases (Unix seconds)."""

    incident: Incident
    decided_at: float
    stopped_at: float | None = None


@dataclass(frozen=True)
class Group:
    """``generation`` is the newest that was, or is being, launched; spec.first_generation - 1 before the first."""

    spec: GroupSpec
    doing: Doing
    since: float
    generation: int
    incarnations: dict[int, str] = field(default_factory=dict)  # agents of the generation that trains
    training: bool = False  # this generation has shown that it trains
    attached: bool = False  # some generation reported steps, of an earlier attempt too, so the next one is expected to
    best_step: int | None = None
    step_slowest: float | None = None  # seconds between two steps, of the newest generation that finished two
    failures: tuple[Failure, ...] = ()
    incidents: tuple[Incident, ...] = ()
    recovery: Recovery | None = None
    nonfinite: tuple[str, ...] = ()  # metrics that this generation was told to have non-finite values
    roll_back: int | None = None  # the program failed after metrics were not finite from this step on: an earlier state is wanted
    stacks_asked_at: float | None = None  # silence was seen then, and the stacks of all ranks asked for
    not_before: float | None = None  # no generation is launched sooner: failures repeat and gain nothing
    restore: RestoreOrder | None = None
    excluded: tuple[CheckpointFound, ...] = ()  # checkpoints that this attempt takes no more, damaged or unwanted
    away_since: float | None = None  # storage does not give a checkpoint that it lists
    unfetched: tuple[int, ...] = ()  # steps that, in this recovery, could not be made whole from other nodes
    mirrored: int | None = None  # step of the newest memory checkpoint that is complete on all nodes
    checkpoints: tuple[CheckpointRecord, ...] = ()  # committed by this attempt, oldest first
    pruned: tuple[str, ...] = ()  # urls that retention removed
    checks: tuple[CheckpointCheck, ...] = ()  # what reading checkpoints back has shown, oldest first
    ranks: tuple[RankReport, ...] = ()  # as last seen, so that a report can be given while agents are away
    end: EndRequest | None = None
    events: tuple[GroupEvent, ...] = ()
    next_seq: int = 1
    started_at: float | None = None
    outcome: Outcome | None = None
    reason: str = ""
    message: str = ""
    ended_at: float | None = None
    fence: int = 0  # highest of the servers that gave orders; one with a lower fence is refused

    def go(self, doing: Doing, now: float) -> Group:
        return replace(self, doing=doing, since=now, away_since=None)

    def say(self, now: float, reason: str, message: str, rank: int | None = None) -> Group:
        event = GroupEvent(self.next_seq, now, reason, message, self.generation if self.generation >= 0 else None, rank)
        return replace(self, events=(*self.events, event)[-KEPT_EVENTS:], next_seq=self.next_seq + 1)

    def close(self, now: float, outcome: Outcome, reason: str, message: str) -> Group:
        """The outcome is known; what is left must still be ended."""
        return replace(self.go(Doing.CLOSING, now), outcome=outcome, reason=reason, message=message)

    def checked(self, now: float, url: str, problem: str | None) -> Group:
        """The bytes of a checkpoint were read; ``problem``: its damage."""
        return replace(self, checks=(*self.checks, CheckpointCheck(url, now, problem))[-KEPT_RECORDS:])

    @property
    def damaged(self) -> frozenset[str]:
        """Urls of checkpoints that did not hold when they were last read."""
        newest = {c.url: c.problem for c in self.checks}
        return frozenset(url for url, problem in newest.items() if problem is not None)

    @property
    def checkpoint_step(self) -> int | None:
        """Of the newest checkpoint that this attempt committed and may take."""
        bad = self.damaged | self.barred
        return max((c.step for c in self.checkpoints if c.url not in bad), default=None)

    @property
    def barred(self) -> frozenset[str]:
        """Urls of the checkpoints that are ``excluded``."""
        return frozenset(c.url for c in self.excluded)

    @property
    def backing_off(self) -> bool:
        """All ranks have ended, and the next start is put off."""
        return self.doing == Doing.STOPPING and self.recovery is not None and self.recovery.stopped_at is not None

    @property
    def first(self) -> bool:
        """No generation of this attempt has trained yet."""
        return self.started_at is None

    @property
    def stepping(self) -> bool:
        """Every rank of this generation has finished a step, new or done again."""
        stepped = [r for r in self.ranks if r.generation == self.generation and r.step]
        return len(stepped) == self.spec.world_size

    @property
    def shown(self) -> tuple[GroupPhase, str, str]:
        """Phase, reason and message for the report."""
        first = self.first and self.recovery is None
        if self.backing_off:
            return GroupPhase.RECOVERING, "BackingOff", "the same failure came again without a step gained: the next start waits a little"
        if self.doing == Doing.TRAINING:
            if self.training:
                return GroupPhase.RUNNING, "Training", f"generation {self.generation} trains"
            phase = GroupPhase.STARTING if first else GroupPhase.RECOVERING
            if self.stepping and self.restore is not None and self.best_step is not None:
                return phase, "RedoingSteps", f"redoing steps {self.restore.step + 1} to {self.best_step}"
            return phase, "WaitingForFirstStep", "ranks are launched, no new step yet"
        at_first, later, reason, message = SHOWN[self.doing]
        return (at_first if first else later), reason, message


@dataclass(frozen=True)
class Kept:
    """A Group as an agent keeps it for the next coordinator; the highest (term, sequence) is the newest."""

    term: int
    sequence: int
    group: Group
    at: float = 0.0  # Unix time of the coordinator that kept it


def new_group(spec: GroupSpec, now: float) -> Group:
    """The state of a group that does not exist yet."""
    return Group(
        spec,
        Doing.PLACING,
        now,
        spec.first_generation - 1,
        failures=spec.prior_failures,
        best_step=spec.prior_best_step,
        attached=spec.prior_best_step is not None,
    )


@dataclass(frozen=True)
class AgentSeen:
    """One agent as the coordinator sees it. ``missing_since`` is set while it does not answer; ``died``: its process
    ended, says Ray; ``node_lost``: so did its node; ``alive``: asked since it is missing, Ray knew of neither; ``heard_at``: when the
    status came."""

    index: int
    status: AgentStatus | None
    missing_since: float | None = None
    died: bool = False
    node_lost: bool = False
    alive: bool = False
    heard_at: float | None = None


@dataclass(frozen=True)
class Seen:
    """One observation. ``catalog``: checkpoints in storage, newest first; None: not read for this recovery yet."""

    agents: tuple[AgentSeen, ...]
    catalog: tuple[CheckpointFound, ...] | None = None
    catalog_problem: str | None = None
    final_saved: bool = False  # the write of the final checkpoint is over
    end: EndRequest | None = None
    final_problem: str | None = None  # why it is not in storage
    past_generation: int = -1  # newest generation of this attempt that storage knows
    refused: str | None = None  # why this attempt may not use the job's folder


@dataclass(frozen=True)
class StopRanks:
    """SIGKILL to every process of every rank up to ``generation``."""

    generation: int


@dataclass(frozen=True)
class TerminateRanks:
    """SIGTERM to each rank's main process, once."""

    generation: int


@dataclass(frozen=True)
class TakeStacks:
    """Python stacks of all ranks, as evidence before they are ended; ``asked_at`` names the request."""

    asked_at: float


@dataclass(frozen=True)
class Launch:
    """Fork the ranks of ``generation``. ``await_step``: the first step that would be new."""

    generation: int
    restore: RestoreOrder
    await_step: int


@dataclass(frozen=True)
class ReadCatalog:
    """List the checkpoints in storage; ``asked_at`` names the request, an answer to another one is void."""

    asked_at: float


@dataclass(frozen=True)
class Stage:
    """Every agent reads and verifies this checkpoint into shared memory."""

    url: str


@dataclass(frozen=True)
class Unstage:
    """The ranks have restored: free the memory of staged checkpoints."""


@dataclass(frozen=True)
class FetchPeers:
    """The agents make the snapshots of ``step`` whole from each other's."""

    step: int
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True)
class SaveFinal:
    """Write the newest snapshot of all ranks to storage."""

    generation: int


Action = StopRanks | TerminateRanks | TakeStacks | Launch | ReadCatalog | Stage | Unstage | FetchPeers | SaveFinal


@dataclass(frozen=True)
class Decision:
    """``reason`` is why, as a stable token; ``look_again_at`` when to decide anew even if nothing changes."""

    group: Group
    actions: tuple[Action, ...]
    reason: str
    look_again_at: float | None = None


def gone_agents(seen: Seen, now: float) -> list[AgentSeen]:
    """Agents whose process or node ended, or that missed their heartbeats for too long."""
    return [a for a in seen.agents if a.died or a.node_lost or _silent(a, now)]


def _silent(agent: AgentSeen, now: float) -> bool:
    return agent.missing_since is not None and now - agent.missing_since >= (AGENT_PAUSED_S if agent.alive else AGENT_LOST_S)


def all_stopped(seen: Seen) -> bool:
    """No rank lives on any node."""
    return all(a.status and a.status.stopped for a in seen.agents)


def ranks_of(group: Group, seen: Seen) -> tuple[RankReport, ...]:
    """Reports of the ranks of the current generation, by rank."""
    found = [r for a in seen.agents if a.status for r in a.status.ranks if r.generation == group.generation]
    return tuple(sorted(found, key=lambda r: r.rank))
