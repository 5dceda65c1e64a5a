"""The coordinator: the Ray actor that leads a group. It sees through the agents, decides with ``restart.decide``, keeps, then acts.

Invariants: the decided state is kept by the agents before, or with, the order that follows from it; all orders carry the term, so a
coordinator that has been replaced can do nothing, nor can a server whose lease is over; it needs
neither control plane nor database to recover a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from workers.agent import StaleLeader
from workers.agents import NodeGone, address_of, make_agent
from workers.checkpoint.background import in_thread
from workers.clocks import Offset, on_our_clock
from workers.group import (
    REPEAT_S,
    Action,
    AgentSeen,
    Doing,
    EndRequest,
    FetchPeers,
    Group,
    Kept,
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
    ranks_of,
)
from workers.listing import Listing
from workers.messages import AgentStatus, GroupPhase, GroupReport, GroupSpec, LaunchOrder, Source, StaleServer, check_schema
from workers.mirroring import Mirror
from workers.news import News
from workers.restart import decide
from workers.saving import Saver
from workers.steady import SteadyClock

_log = logging.getLogger(__name__)

FOLLOW_S = 5.0  # for an agent, which may still be starting, to answer a new leader; asked again otherwise
POLL_S = 3.0  # an agent that does not answer a poll for this long is missing
ASK_S = 2.0  # for an answer of Ray
ORDER_S = 60.0
TAKE_OVER_S = 10.0  # for all agents of a group that has run to answer a new leader; agents that nobody leads would end themselves
FIND_S = 60.0  # the same, before anything ran
LONG_ORDERS = frozenset({"write_share", "stage", "copy_slots", "guard_copies", "try_restore"})  # bound by storage or size, not by us


def coordinator_name(key: str) -> str:
    return f"{key}.coordinator"


class Coordinator:
    def __init__(self, spec: GroupSpec, fence: int) -> None:
        """``fence``: of the server that makes the group."""
        check_schema(spec)
        self.spec = spec
        self.clock = SteadyClock()
        self.group = replace(new_group(spec, self.clock.now()), fence=fence)
        self.term = 0
        self.version = 1
        self.sequence = 0
        self.agents: dict[int, Any] = {}
        self.seen = {n.index: AgentSeen(n.index, None, self.clock.now()) for n in spec.nodes}
        self._offsets: dict[int, Offset] = {}  # of the nodes' clocks
        self.listing = Listing(spec, lambda: self.group)
        self.final_saved = False
        self.final_problem: str | None = None
        self.end_request: EndRequest | None = None
        self.closed = False
        self.mirror = Mirror(spec, self._all, lambda: self.group, self._update, self.clock.now)
        self.saver = Saver(spec, self._all, lambda: self.group, self._update, self._observation, self.mirror, self.clock.now)
        self._running: dict[Action, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._news = News()
        self._tasks = [asyncio.create_task(self._lead())]

    # the loop

    async def _lead(self) -> None:
        try:
            await self._take_over()
        except Exception:  # Ray starts the next leader
            _log.exception("no leader can be made of this process")
            os._exit(1)
        self._tasks += [asyncio.create_task(self._watch(n.index)) for n in self.spec.nodes]
        while not self.closed:
            self._wake.clear()
            try:
                look_again_at = self._decide()
            except Exception:  # a bug must not leave ranks without a leader
                _log.exception("no decision was possible")
                look_again_at = self.clock.now() + 1.0
            timeout = None if look_again_at is None else max(0.0, look_again_at - self.clock.now())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout)

    def _decide(self) -> float | None:
        before = self.group
        decision = decide(before, self._observation(), self.clock.now())
        self.group = decision.group
        self.listing.keep_up()
        if replace(self.group, ranks=()) != replace(before, ranks=()):
            self.sequence += 1
            if not any(isinstance(a, StopRanks | Launch) for a in decision.actions):  # those carry the state themselves
                self._tasks.append(asyncio.create_task(self._quietly_keep()))
        if self.group != before:
            self._changed()
        for action in decision.actions:
            if action not in self._running:
                self._running[action] = asyncio.create_task(self._do(action))
        if self.group.doing is Doing.TRAINING and self.group.stepping:
            self.saver.look(self._observation(), self.clock.now())
        self._tasks = [t for t in self._tasks if not t.done()]
        return decision.look_again_at

    def _observation(self) -> Seen:
        return Seen(
            tuple(self.seen.values()),
            self.listing.found,
            self.listing.problem,
            self.final_saved,
            self.end_request,
            self.final_problem,
            self.listing.past_generation,
            self.listing.refused,
        )

    def _update(self, group: Group) -> None:
        """The saver's changes: kept like every other."""
        self.group = group
        self.sequence += 1
        self._tasks.append(asyncio.create_task(self._quietly_keep()))
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._news.look(self.group)

    def _kept(self) -> Kept:
        return Kept(self.term, self.sequence, self.group, self.clock.now())

    async def _quietly_keep(self) -> None:
        with contextlib.suppress(Exception):
            await self._all("keep", self._kept())

    # agents

    async def _take_over(self) -> None:
        """Find or make the agents, learn the highest term and the newest kept state, and lead with a term above."""
        answers: dict[int, tuple[AgentStatus, int, Kept | None]] = {}
        started = time.monotonic()
        missing = [n.index for n in self.spec.nodes]
        limit = FIND_S
        while missing and not self.closed and self.end_request is None and time.monotonic() - started < limit:
            found = await asyncio.gather(*(self._find_agent(i) for i in missing))
            answers |= {index: answer for index, answer in zip(missing, found, strict=True) if answer is not None}
            missing = [i for i in missing if i not in answers and not self.seen[i].node_lost]
            limit = TAKE_OVER_S if any(kept is not None for _, _, kept in answers.values()) else FIND_S
            if missing:
                await asyncio.sleep(0.2)
        kept = max((k for _, _, k in answers.values() if k is not None), key=lambda k: (k.term, k.sequence), default=None)
        terms = [before for _, before, _ in answers.values()]
        self.term = max([*terms, kept.term if kept is not None else 0], default=0) + 1
        if kept is not None:
            self.clock.reach(kept.at)  # its deadlines are by the clock of the one before
            fence = max(self.group.fence, kept.group.fence)
            self.group = replace(kept.group, fence=fence).say(
                self.clock.now(), "CoordinatorRestarted", f"term {self.term} goes on from term {kept.term}; ranks were not touched"
            )
            self.sequence = kept.sequence + 1
        for index, (status, _, _) in answers.items():
            self._heard(index, status)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.agents[index].follow.remote(self.term), 5)

    async def _find_agent(self, index: int) -> tuple[AgentStatus, int, Kept | None] | None:
        """Its answer to a leader without a term yet; None where it has none, for now or because its node is lost."""
        try:
            self.agents[index] = await asyncio.to_thread(make_agent, self.spec, index)
            answer: tuple[AgentStatus, int, Kept | None] = await asyncio.wait_for(self.agents[index].follow.remote(0), FOLLOW_S)
            return answer
        except NodeGone:
            self._lost(index)
            return None
        except Exception as error:
            _log.warning("agent %s does not answer yet: %s", index, error)
            return None

    async def _watch(self, index: int) -> None:
        """Poll one agent for ever; make a new one when its process has died."""
        while not self.closed:
            agent = self.agents.get(index)
            status = self.seen[index].status
            try:
                if agent is None:
                    raise LookupError(f"agent {index} was never made")
                self._heard(index, await asyncio.wait_for(agent.poll.remote(self.term, status.version if status else 0), POLL_S))
            except TimeoutError:
                self._missed(index, died=False)
                await self._look_for_node(index)
            except (ActorDiedError, LookupError):
                self._missed(index, died=True)
                await self._replace_agent(index)
            except Exception as error:  # whatever Ray raises: an agent that nobody asks is an agent that is never missed
                if isinstance(error, RayTaskError) and isinstance(error.cause, StaleLeader):
                    self.closed = True
                    return
                if not isinstance(error, RayActorError):
                    _log.warning("agent %s cannot answer: %s", index, error)
                self._missed(index, died=False)
                await self._look_for_node(index)
                await asyncio.sleep(0.1)

    async def _replace_agent(self, index: int) -> None:
        try:
            self.agents[index] = await asyncio.to_thread(make_agent, self.spec, index)
            status, _, _ = await asyncio.wait_for(self.agents[index].follow.remote(self.term), 5)
            self._heard(index, status)
            self._update(self.group.say(self.clock.now(), "AgentReplaced", f"node {index} has a new agent; its launcher warms up"))
        except NodeGone:
            self._lost(index)
        except Exception as error:
            _log.warning("agent %s cannot be made yet: %s", index, error)
            await self._look_for_node(index)
        await asyncio.sleep(0.05)

    async def _look_for_node(self, index: int) -> None:
        """Ray is asked before silence counts as death. An agent on a node that has ended will never answer."""
        alive = False
        try:
            await in_thread(address_of, self.spec, index, limit_s=ASK_S)
            alive = True
        except NodeGone:
            self._lost(index)
        except Exception as error:
            _log.warning("Ray cannot tell of node %s, so its agent's silence counts alone: %s", index, error)
        if self.seen[index].missing_since is not None:
            self.seen[index] = replace(self.seen[index], alive=alive)

    def _lost(self, index: int) -> None:
        self.seen[index] = replace(self.seen[index], node_lost=True)
        self._wake.set()

    def _heard(self, index: int, status: AgentStatus) -> None:
        known = self.seen[index].status
        if known is not None and known.incarnation == status.incarnation and known.version > status.version:
            return
        told = len(known.notes) if known is not None and known.incarnation == status.incarnation else 0
        before = {(e.rank, e.reason, e.message) for e in self.group.events} if not told else set()  # by a coordinator before this one
        for rank, reason, text in status.notes[told:]:
            if (rank, reason, text) not in before:
                self._update(self.group.say(self.clock.now(), reason, text, rank))
        now = self.clock.now()
        offsets = self._offsets.setdefault(index, Offset())
        offsets.heard(status, now)
        self.seen[index] = AgentSeen(index, on_our_clock(status, offsets.seconds), heard_at=now)
        self._wake.set()

    def _missed(self, index: int, died: bool) -> None:
        known = self.seen[index]
        self.seen[index] = replace(known, missing_since=known.missing_since or self.clock.now(), died=died or known.died)
        self._wake.set()

    async def _all(self, order: str, *args: Any) -> Mapping[int, Any]:
        """One order to all agents; their answers by node. Raises the first error after all have answered."""
        limit = None if order in LONG_ORDERS else ORDER_S

        async def one(index: int) -> Any:
            asked = self.agents[index]
            answer = await asyncio.wait_for(getattr(asked, order).remote(self.term, *args), limit)
            if isinstance(answer, AgentStatus) and self.agents[index] is asked:
                self._heard(index, answer)
            return answer

        indexes = list(self.agents)
        answers = await asyncio.gather(*(one(i) for i in indexes), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(indexes, answers, strict=True))

    # orders

    async def _do(self, action: Action) -> None:
        try:
            match action:
                case StopRanks(generation):
                    await self._all("stop", generation, self._kept())
                case TerminateRanks():
                    await self._all("terminate")
                case TakeStacks(asked_at):
                    await self._all("take_stacks", asked_at)
                case Launch():
                    await self._launch(action)
                case ReadCatalog(asked_at):
                    await self.listing.read(asked_at)
                case Stage(url):
                    await self._all("stage", url)
                case Unstage():
                    await self._all("unstage")
                case FetchPeers(step, fetches):
                    await self._all("fetch", step, fetches)
                case SaveFinal(generation):
                    await self._all("stop", generation, self._kept())
                    self.final_problem = await self.saver.save_final(self._observation())
                    self.final_saved = True
        except Exception as error:
            _log.warning("%s failed, the rule repeats it or gives up in time: %s", action, error)
        self._wake.set()
        await asyncio.sleep(REPEAT_S)  # its effect may still be under way; not sooner again
        self._running.pop(action, None)
        self._wake.set()

    async def _launch(self, action: Launch) -> None:
        rendezvous = self.agents[0].open_rendezvous.remote(self.term, action.generation)
        address, port, served = await asyncio.wait_for(rendezvous, ORDER_S)
        await self._all("launch", LaunchOrder(action.generation, action.restore, action.await_step, address, port, served), self._kept())

    # what the control plane calls

    def _follow_server(self, fence: int | None) -> None:
        """Raises StaleServer. None: somebody who only looks."""
        if fence is None or fence == self.group.fence:
            return
        if fence < self.group.fence:
            raise StaleServer(f"lease {fence} is over, {self.group.fence} leads")
        self._update(replace(self.group, fence=fence))

    async def report(self, fence: int | None = None) -> GroupReport:
        """Raises StaleServer, as every order does."""
        self._follow_server(fence)
        group = self.group
        phase, reason, message = group.shown
        ranks = ranks_of(group, self._observation())
        steps = [r.step for r in ranks]
        return GroupReport(
            job_id=self.spec.job_id,
            attempt=self.spec.attempt,
            version=self.term * 1_000_000_000 + self.version,
            generation=group.generation,
            phase=phase,
            reason=group.reason or reason,
            message=group.message or message,
            ranks=ranks or group.ranks,
            step=min((s for s in steps if s), default=None) if steps and all(steps) else None,
            best_step=group.best_step,
            metrics=self.seen[0].status.metrics if self.seen[0].status else {},
            failures=group.failures,
            incidents=group.incidents,
            events=group.events,
            checkpoints=group.checkpoints,
            pruned=group.pruned,
            checks=group.checks,
            saving=self.saver.progress,
            started_at=group.started_at,
            resumed_step=group.restore.step if group.restore and (group.attached or group.restore.source != Source.NONE) else None,
            restored_from=group.restore.source if group.restore else Source.NONE,
            outcome=group.outcome if phase == GroupPhase.ENDED else None,
            ended_at=group.ended_at,
        )

    async def news(self, seen: int) -> int:
        """Answers, with a number to ask with the next time, as soon as there is more news than at ``seen``."""
        return await self._news.after(seen)

    async def end(self, grace_s: float, fence: int) -> None:
        """Idempotent; a later call may only shorten the grace."""
        self._follow_server(fence)
        known = self.end_request
        if known is None or grace_s < known.grace_s:
            self.end_request = EndRequest(known.at if known else self.clock.now(), grace_s)
            if self.group.end is not None:
                self._update(replace(self.group, end=self.end_request))
        self._wake.set()

    async def drill(self, fault: str, rank: int) -> str:
        """Raises ValueError when the fault cannot be injected now."""
        if fault == "corrupt_checkpoint":
            return await self.saver.corrupt_newest()
        index = rank // self.spec.processes_per_node
        try:
            said, status = await self.agents[index].drill.remote(self.term, fault, rank)
        except RayTaskError as error:
            raise ValueError(str(error.cause)) from None
        self._heard(index, status)
        return str(said)

    async def close(self, fence: int) -> list[int]:
        """Every agent ends what it has, frees its memory and leaves; returns pids that would not go. The caller removes this actor."""
        self._follow_server(fence)
        self.closed = True
        left = await self._all("close")
        for agent in self.agents.values():
            with contextlib.suppress(RayActorError):
                await asyncio.wait_for(agent.leave.remote(), ORDER_S)
        return [pid for pids in left.values() for pid in pids]
