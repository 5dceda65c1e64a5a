"""Simulated nodes of a group: agents, ranks and the snapshots in their shared memory. The coordinator sees them as AgentSeen.

Ranks step together; one that ended or hangs holds up the others, and those that wait for an ended one fail in consequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.group import AgentSeen
from workers.messages import (
    AgentStatus,
    Copy,
    ErrorReport,
    Fetch,
    Holding,
    Problem,
    ProcessStack,
    RankPhase,
    RankReport,
    RankStacks,
    RankState,
    RestoreOrder,
    Source,
)

GLOO = ErrorReport("RuntimeError", "Connection closed by peer", "", "train.py:3 in step")
BUG = ErrorReport("ValueError", "a bug", "", "train.py:9 in step")


WAITS = ("all_reduce (torch/distributed/distributed_c10d.py:3252)", "step (train.py:20)")
NODE_LOST_S = 5.0  # Ray has noticed by then that the machine went away
STUCK = ("read (loader.py:7)", "step (train.py:18)")


@dataclass
class SimRank:
    rank: int
    local: int
    started_at: float
    step: int
    await_step: int
    new_step_at: float | None = None
    step_at: float | None = None
    hung: bool = False
    exit_code: int | None = None
    signal: int | None = None
    ours: bool = False
    error: ErrorReport | None = None
    ended_at: float | None = None

    def end(
        self, now: float, exit_code: int | None = None, signal: int | None = None, ours: bool = False, error: ErrorReport | None = None
    ) -> None:
        if self.ended_at is None:
            self.exit_code, self.signal, self.ours, self.error, self.ended_at = exit_code, signal, ours, error, now

    def reach(self, step: int, now: float) -> None:
        if step > self.step:
            self.step, self.step_at = step, now
        if self.new_step_at is None and self.step >= self.await_step:
            self.new_step_at = now


@dataclass
class SimAgent:
    """``made_at``: it answers for the first time; ``back_at``: its process is dead until then; None: it lives.

    Snapshots outlive it, for they are in shared memory, and so do copies of a memory checkpoint: ``copied`` of its own ranks, ``guarded``
    of what is their own of the ranks of the node before it."""

    index: int
    node_id: str
    per_node: int
    world_size: int
    ready_at: float
    made_at: float | None = None
    incarnation: int = 0
    back_at: float | None = None
    unreachable_since: float | None = None
    generation: int = -1
    fenced: int = -1  # newest generation that was ended: it is not launched any more
    ranks: list[SimRank] = field(default_factory=list)
    snapshot: int | None = None
    damaged: bool = False  # the part of the snapshot that all nodes share
    copied: int | None = None
    guarded: int | None = None
    unfetched: dict[int, str] = field(default_factory=dict)
    staged: dict[str, Problem | None] = field(default_factory=dict)
    stacks_of: float | None = None  # the request for stacks that it has answered
    told: AgentStatus | None = None  # what it said last
    told_at: float | None = None

    @property
    def answers(self) -> bool:
        return self.made_at is None and self.back_at is None and self.unreachable_since is None

    def dies(self, now: float, back_in: float) -> None:
        self.back_at = now + back_in
        self.ranks, self.staged, self.unfetched, self.generation = [], {}, {}, -1

    def loses_memory(self) -> None:
        """Its machine went away, or somebody cleaned its shared memory: nothing of it is left."""
        self.snapshot = self.copied = self.guarded = None

    def fetch(self, step: int, fetches: tuple[Fetch, ...], agents: list[SimAgent]) -> None:
        """Take what the rule says that others have; what is not there any more cannot be had."""
        mine = [f for f in fetches if f.rank in self.numbers]
        if mine and step not in self.unfetched and all(rank.ended_at is not None for rank in self.ranks):
            if all(self._can(step, f, agents) for f in mine):
                self.snapshot, self.damaged = step, False
            else:
                self.unfetched[step] = "it is gone"

    def _can(self, step: int, f: Fetch, agents: list[SimAgent]) -> bool:
        own = [a for a in (agents[node] for node in f.own) if a.answers and step == (a.copied if a is self else a.guarded)]
        shared = [a for a in (agents[node] for node in f.shared) if a.answers and step in (a.copied, None if a.damaged else a.snapshot)]
        return bool(shared) and (bool(own) or (not f.own and self.snapshot == step))

    @property
    def numbers(self) -> range:
        return range(self.index * self.per_node, (self.index + 1) * self.per_node)

    def advance(self, now: float) -> None:
        if self.made_at is not None and now >= self.made_at:
            self.made_at = None
        if self.back_at is not None and now >= self.back_at and self.unreachable_since is None:
            self.back_at, self.incarnation, self.ready_at = None, self.incarnation + 1, now + 0.5

    def seen(self, now: float) -> AgentSeen:
        if self.answers:
            self.told, self.told_at = self._status(now), now
        missing_since = self.unreachable_since if self.made_at is None else now
        lost = self.unreachable_since is not None and now - self.unreachable_since > NODE_LOST_S
        return AgentSeen(self.index, self.told, missing_since, died=self.back_at is not None, node_lost=lost, heard_at=self.told_at)

    def launch(self, generation: int, restore: RestoreOrder, await_step: int, now: float) -> None:
        if generation <= max(self.generation, self.fenced) or now < self.ready_at or any(rank.ended_at is None for rank in self.ranks):
            return
        self.generation = generation
        self.snapshot = restore.step if restore.source in (Source.MEMORY, Source.PEER) else None
        self.copied = None if self.copied is not None and self.copied > restore.step else self.copied
        self.guarded = None if self.guarded is not None and self.guarded > restore.step else self.guarded
        self.unfetched = {}
        self.stacks_of = None
        self.ranks = [SimRank(number, n, now, restore.step, await_step) for n, number in enumerate(self.numbers)]

    def stop(self, generation: int, now: float) -> None:
        self.fenced = max(self.fenced, generation)
        for rank in self.ranks if self.generation <= generation else ():
            rank.end(now, signal=9, ours=True)

    def _status(self, now: float) -> AgentStatus:
        stopped = all(rank.ended_at is not None for rank in self.ranks)
        return AgentStatus(
            index=self.index,
            incarnation=str(self.incarnation),
            version=1,
            ready=now >= self.ready_at,
            problem=None,
            generation=self.generation,
            stopped=stopped,
            ranks=tuple(self._report(rank) for rank in self.ranks),
            holdings=() if self.snapshot is None else tuple(self._holding(rank, self.snapshot) for rank in self.numbers),
            staged=dict(self.staged),
            pinned={},
            metrics={},
            copies=tuple(self._copies()),
            unfetched=dict(self.unfetched),
            at=now,
            silent={rank.rank: now - (rank.step_at or rank.started_at) for rank in self.ranks},
            stacks_of=self.stacks_of,
            stacks=tuple(_stacks(rank) for rank in self.ranks if rank.ended_at is None) if self.stacks_of is not None else (),
        )

    def _holding(self, rank: int, step: int) -> Holding:
        return Holding(rank, step, self.generation, 0, False, 1, shared_valid=not self.damaged, own_valid=True)

    def _copies(self) -> list[Copy]:
        found = [] if self.copied is None else [Copy(rank, self.copied, True) for rank in self.numbers]
        if self.guarded is not None:
            found += [Copy((rank - self.per_node) % self.world_size, self.guarded, False) for rank in self.numbers]
        return found

    def _report(self, rank: SimRank) -> RankReport:
        ended = rank.ended_at is not None
        return RankReport(
            rank=rank.rank,
            node_index=self.index,
            node_id=self.node_id,
            local_rank=rank.local,
            generation=self.generation,
            pid=100 + rank.rank,
            state=RankState.EXITED if ended else RankState.RUNNING,
            phase=RankPhase.STEP,
            phase_at=rank.started_at,
            step=rank.step or None,
            step_at=rank.step_at,
            step_slowest=0.5,
            exit_code=rank.exit_code,
            signal=rank.signal,
            ours=rank.ours,
            attached=True,
            os_state="S" if not ended else None,
            started_at=rank.started_at,
            ended_at=rank.ended_at,
            new_step_at=rank.new_step_at,
            error=rank.error,
        )


def _stacks(rank: SimRank) -> RankStacks:
    frames = STUCK if rank.hung else WAITS
    return RankStacks(rank.rank, ProcessStack(100 + rank.rank, "S", frames, frames[-1]), (), "\n".join(frames))
