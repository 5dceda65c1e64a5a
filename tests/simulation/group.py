"""A simulated group: its agents, and a coordinator that follows the real rule of ``workers.restart``.

Like the real one it saves its state before it acts on it; when it dies and returns, only the numbering of its reports may begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.simulation.agents import BUG, GLOO, SimAgent, SimRank
from tests.simulation.clock import Dice
from workers.group import (
    EndRequest,
    FetchPeers,
    Launch,
    ReadCatalog,
    SaveFinal,
    Seen,
    Stage,
    StopRanks,
    TakeStacks,
    TerminateRanks,
    Unstage,
    new_group,
)
from workers.messages import CheckpointFound, CheckpointRecord, FailureClass, GroupReport, GroupSpec
from workers.restart import decide

CHECKPOINT_EVERY = 20
LATE_S = 6.0
CHARGED = (FailureClass.INFRASTRUCTURE, FailureClass.UNKNOWN, FailureClass.PREEMPTION)


@dataclass
class Storage:
    """The folders of all jobs: committed (attempt, generation, step) by job id, in the order of their commits."""

    commits: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    def newest(self, job_id: str, before: tuple[int, int]) -> int:
        """Highest step that was committed by generations before this (attempt, generation)."""
        return max((step for attempt, generation, step in self.commits.get(job_id, []) if (attempt, generation) < before), default=0)


class SimGroup:
    def __init__(self, spec: GroupSpec, fence: int, now: float, dice: Dice, storage: Storage) -> None:
        self.spec, self.dice, self.storage = spec, dice, storage
        self.total = int(spec.command[1])
        self.rate = dice.between(1, 4)
        self.agents: list[SimAgent] = []
        self.coordinator_back_at: float | None = None
        self.silent_until = 0.0
        self.trained_at = now
        self.catalog: tuple[CheckpointFound, ...] | None = None
        self.final_saved = False
        self.watch: Callable[[SimGroup, bool], None] = lambda group, acted: None  # called before and after what follows from a decision
        self.orders = "done"  # or for the agents: lost, late, twice
        self.late: list[tuple[float, object]] = []
        self.end_request: EndRequest | None = None
        self.group = self.kept = replace(new_group(spec, now), fence=fence)  # kept: by the agents before the newest decision
        self.version = 1
        self.report = self._report()
        self.history: list[GroupReport] = []

    @property
    def key(self) -> tuple[str, int]:
        return (self.spec.job_id, self.spec.attempt)

    @property
    def placed(self) -> bool:
        return bool(self.agents)

    def place(self, now: float) -> None:
        size = (self.spec.processes_per_node, self.spec.world_size)
        made_at = now + self.dice.between(0, 3)
        self.agents = [SimAgent(p.index, p.node_id, *size, made_at + self.dice.between(0.1, 5), made_at) for p in self.spec.nodes]

    @property
    def ranks(self) -> list[SimRank]:
        return [rank for agent in self.agents for rank in agent.ranks]

    def advance(self, now: float) -> None:
        """Lets the time until ``now`` pass, in moments of a second."""
        while self.trained_at < now:
            moment = min(now, self.trained_at + 1.0)
            self._train(moment - self.trained_at, moment)
            self.trained_at = moment
            for agent in self.agents:
                agent.advance(moment)
            due = [order for at, order in self.late if at <= moment]
            self.late = [(at, order) for at, order in self.late if at > moment]
            for order in due:
                self._do(order, moment)
            self._coordinate(moment)

    # ranks

    def _train(self, seconds: float, now: float) -> None:
        ranks = self.ranks
        generations = {agent.generation for agent in self.agents}
        if len(ranks) < self.spec.world_size or len(generations) > 1 or any(rank.hung and rank.ended_at is None for rank in ranks):
            return
        if any(rank.ended_at is not None for rank in ranks):
            if any(rank.exit_code != 0 for rank in ranks):
                for rank in ranks:
                    rank.end(now, exit_code=1, error=GLOO)
            return
        before = min(rank.step for rank in ranks)
        after = min(self.total, before + max(1, int(seconds * self.rate)))
        for rank in ranks:
            rank.reach(after, now)
        for agent in self.agents:
            agent.snapshot, agent.damaged = after, False
        for step in range(before + 1, after + 1):
            if step % CHECKPOINT_EVERY == 0:
                self._commit(step, now)
        if after >= self.total:
            for rank in ranks:
                rank.end(now, exit_code=0)

    def _commit(self, step: int, now: float) -> None:
        generation = self.agents[0].generation
        self.storage.commits.setdefault(self.spec.job_id, []).append((self.spec.attempt, generation, step))
        url = f"{self.spec.storage_url}/{step}.{self.spec.attempt}.{generation}"
        record = CheckpointRecord(self.spec.job_id, self.spec.attempt, generation, step, url, 1, 1, self.spec.world_size, now, 0.1)
        self.group = replace(self.group, checkpoints=(*self.group.checkpoints, record)[-5:])
        if len(self.agents) > 1 and not self.dice.fault(0.2):
            self.group = replace(self.group, mirrored=step)
            for agent in self.agents:
                agent.copied = agent.guarded = step

    # coordinator

    @property
    def coordinator(self) -> bool:
        return self.coordinator_back_at is None

    def _coordinate(self, now: float) -> None:
        if self.coordinator_back_at is not None:
            if now < self.coordinator_back_at:
                return
            self.coordinator_back_at = None
            self.version = 1 if self.dice.fault(0.5) else self.version
        for _ in range(4):
            seen = Seen(tuple(a.seen(now) for a in self.agents), self.catalog, None, self.final_saved, self.end_request)
            if not self.agents and self.end_request is None:
                return  # its placement group has no room yet
            decision = decide(self.group, seen, now)
            self.kept, self.group = self.group, decision.group
            self.watch(self, False)
            if not self.coordinator:
                return
            for action in decision.actions:
                self._order(action, now)
            self.watch(self, True)
        self._publish()

    def _order(self, action: object, now: float) -> None:
        if self.orders == "late":
            self.late.append((now + LATE_S, action))
        elif self.orders != "lost":
            self._do(action, now)
        if self.orders == "twice":
            self._do(action, now)

    def _do(self, action: object, now: float) -> None:
        match action:
            case StopRanks(generation):
                for agent in self._reachable():
                    agent.stop(generation, now)
            case TerminateRanks():
                for rank in (rank for agent in self._reachable() for rank in agent.ranks):
                    if self.dice.random.random() < 0.5:
                        rank.end(now, signal=15, ours=True)
            case TakeStacks(asked_at):
                for agent in self._reachable():
                    if not self.dice.fault(0.2):  # a process that cannot be read must not hold up the recovery
                        agent.stacks_of = asked_at
            case Launch(generation, restore, await_step):
                self.catalog = None
                for agent in self._reachable():
                    agent.launch(generation, restore, await_step, now)
            case ReadCatalog():
                steps = sorted({step for _, _, step in self.storage.commits.get(self.spec.job_id, [])}, reverse=True)
                self.catalog = tuple(CheckpointFound(f"{self.spec.storage_url}/{step}", step) for step in steps)
            case Stage(url):
                for agent in self._reachable():
                    agent.staged[url] = None
            case Unstage():
                for agent in self._reachable():
                    agent.staged.clear()
            case FetchPeers(step, fetches):
                for agent in self._reachable():
                    if not self.dice.fault(0.2):  # else the order is lost
                        agent.fetch(step, fetches, self.agents)
            case SaveFinal():
                self.final_saved = True

    def _reachable(self) -> list[SimAgent]:
        return [agent for agent in self.agents if agent.answers]

    def _publish(self) -> None:
        new = self._report()
        if replace(new, version=self.report.version) != self.report:
            self.history = [*self.history[-20:], self.report]
            self.version += 1
            self.report = replace(new, version=self.version)

    def _report(self) -> GroupReport:
        group = self.group
        phase, reason, _ = group.shown
        ranks = tuple(r for r in group.ranks if r.generation == group.generation)
        steps = [r.step for r in ranks if r.step]
        return GroupReport(
            job_id=self.spec.job_id,
            attempt=self.spec.attempt,
            version=self.version,
            generation=group.generation,
            phase=phase,
            reason=group.reason or reason,
            message=group.message or reason,
            ranks=ranks,
            step=min(steps) if steps and len(steps) == self.spec.world_size else None,
            best_step=group.best_step,
            failures=group.failures,
            incidents=group.incidents,
            events=group.events[-10:],
            checkpoints=group.checkpoints,
            started_at=group.started_at,
            resumed_step=group.restore.step if group.restore else None,
            outcome=group.outcome if group.ended_at is not None else None,
            ended_at=group.ended_at,
        )

    # what happens to it

    def rank_fails(self, how: str, now: float) -> None:
        """``how``: kill, bug or hang."""
        living = [rank for rank in self.ranks if rank.ended_at is None]
        if not living:
            return
        rank = self.dice.random.choice(living)
        if how == "hang":
            rank.hung = True
        elif how == "bug":
            rank.end(now, exit_code=1, error=BUG)
        else:
            rank.end(now, signal=9)

    def memory_fails(self, how: str) -> None:
        """``how``: wipe or damage."""
        if self.agents:
            agent = self.dice.random.choice(self.agents)
            if how == "wipe":
                agent.loses_memory()
            else:
                agent.damaged = True

    def agent_dies(self, now: float, back_in: float) -> None:
        if self.agents:
            self.dice.random.choice(self.agents).dies(now, back_in)

    def node_is(self, node_id: str, down: bool, now: float) -> None:
        for agent in self.agents:
            if agent.node_id != node_id or down == (agent.unreachable_since is not None):
                continue
            agent.unreachable_since = now if down else None
            if down:
                agent.loses_memory()
                agent.dies(now, back_in=0.0)

    def coordinator_dies(self, now: float, back_in: float, forgets: bool = False) -> None:
        """``forgets``: before the agents had its newest decision."""
        self.coordinator_back_at = now + back_in
        self.end_request = None
        self.group = self.kept if forgets else self.group

    def end(self, now: float, grace_s: float) -> None:
        known = self.end_request
        if known is None or grace_s < known.grace_s:
            self.end_request = EndRequest(known.at if known else now, grace_s)
            if self.group.end is not None:
                self.group = replace(self.group, end=self.end_request)
