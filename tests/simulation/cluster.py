"""A simulated Ray: Groups and Nodes over simulated groups; calls get lost, come late or twice, or are not answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.core.model import Attempt, GroupView, Node, NodeState, Presence
from orchestrator.ports import LeaseLost, Unavailable
from tests.simulation.clock import Crash, Dice, SimClock
from tests.simulation.group import SimGroup, Storage
from workers.messages import GroupSpec

Key = tuple[str, int]
NODE_CPUS = 4.0


class SimCluster:
    def __init__(self, clock: SimClock, dice: Dice, nodes: int) -> None:
        self.clock, self.dice, self.storage = clock, dice, Storage()
        self.groups: dict[Key, SimGroup] = {}
        self.down: set[str] = set()  # lost nodes
        self.node_ids = [f"node{n}" for n in range(nodes)]
        self.silent_until = 0.0  # Ray itself does not answer
        self.late: list[tuple[float, Callable[[], None]]] = []
        self.calls = "done"  # or the next call is: lost, late, twice
        self.watch: Callable[[SimGroup, bool], None] = lambda group, acted: None  # see SimGroup
        self.in_between: Callable[[], None] = lambda: None  # what others do while a pass waits for Ray
        self.violations: list[str] = []
        self.on_call: set[Key] = set()  # groups made by calls that were in time
        self.saved_attempt: Callable[[str, int], Attempt | None] = lambda job_id, number: None

    # time

    def advance(self) -> None:
        now = self.clock.now()
        due = [call for at, call in self.late if at <= now]
        self.late = [(at, call) for at, call in self.late if at > now]
        for call in due:
            call()
        for key in sorted(self.groups):
            group = self.groups[key]
            if not group.placed and self._fits(group):
                group.place(now)
            for node in self.node_ids:
                group.node_is(node, node in self.down, now)
            group.advance(now)

    def _fits(self, group: SimGroup) -> bool:
        if any(place.node_id in self.down for place in group.spec.nodes):
            return False
        used = self._used()
        return all(used[place.node_id] + group.spec.cpus_per_node <= NODE_CPUS + 1e-6 for place in group.spec.nodes)

    def _used(self) -> dict[str, float]:
        used = dict.fromkeys(self.node_ids, 0.0)
        for group in self.groups.values():
            if group.placed:
                for place in group.spec.nodes:
                    used[place.node_id] += group.spec.cpus_per_node
        return used

    # faults that the driver injects

    def vanish(self, key: Key) -> None:
        """Ray loses coordinator and placement group; the ranks die with them."""
        self._remove(key)

    # ports

    def nodes(self) -> tuple[Node, ...]:
        self.in_between()
        self._answer()
        used = self._used()
        return tuple(
            Node(
                node, node, "10.0.0.1", NodeState.UNREACHABLE if node in self.down else NodeState.READY, NODE_CPUS, 0, 64.0,
                NODE_CPUS - used[node], 0, 64.0,
            )
            for node in self.node_ids
        )  # fmt: skip

    def observe(self, keys: Sequence[Key], fence: int | None) -> dict[Key, GroupView]:
        self._answer()
        return {key: self._view(key, fence) for key in keys if not self.dice.fault(0.02)}

    def _view(self, key: Key, fence: int | None) -> GroupView:
        group, now = self.groups.get(key), self.clock.now()
        if group is None:
            return GroupView(Presence.ABSENT)
        if not group.coordinator or now < group.silent_until:
            return GroupView(Presence.SILENT)
        if fence is not None:
            _stale(group, fence, late=False)
        if group.history and self.dice.fault(0.05):
            return GroupView(Presence.PRESENT, self.dice.random.choice(group.history))  # a report that was under way for long
        return GroupView(Presence.PRESENT, group.report)

    def existing(self) -> set[Key]:
        self._answer()
        return set(self.groups)

    def create(self, spec: GroupSpec, fence: int) -> None:
        self._call(lambda late: self._create(spec, fence, late))

    def _create(self, spec: GroupSpec, fence: int, late: bool) -> None:
        key = (spec.job_id, spec.attempt)
        if key in self.groups:
            return
        saved = self.saved_attempt(*key)
        if saved is None or saved.nodes != spec.nodes:
            self.violations.append(f"nothing is done that was not saved before: {key} on {spec.nodes}")
        older = self.left_of(spec.job_id)
        if older and not late:
            self.violations.append(f"one live group: {key} was made while {older} existed")
        self.groups[key] = SimGroup(spec, fence, self.clock.now(), self.dice, self.storage)
        self.groups[key].watch = self.watch
        if not late:
            self.on_call.add(key)

    def end(self, job_id: str, attempt: int, grace_s: float, fence: int) -> None:
        def effect(late: bool) -> None:
            group = self.groups.get((job_id, attempt))
            answers = group is not None and group.coordinator and self.clock.now() >= group.silent_until
            if answers and not _stale(group, fence, late):
                group.end(self.clock.now(), grace_s)

        self._call(effect)

    def remove(self, job_id: str, attempt: int, fence: int) -> bool:
        if self.dice.fault(0.25):
            return False  # an agent still holds on
        self._call(lambda _late: self._remove((job_id, attempt)))
        return (job_id, attempt) not in self.groups

    def left_of(self, job_id: str) -> list[Key]:
        """Groups of a job, without those that a late call made."""
        return [key for key in sorted(self.groups) if key[0] == job_id and key in self.on_call]

    def _remove(self, key: Key) -> None:
        self.groups.pop(key, None)
        self.on_call.discard(key)

    def drill(self, job_id: str, attempt: int, fault: str, rank: int) -> str:
        raise ValueError("not simulated")

    def _answer(self) -> None:
        if self.clock.now() < self.silent_until or self.dice.fault(0.02):
            raise Unavailable("Ray does not answer")

    def _call(self, effect: Callable[[bool], None]) -> None:
        """A call that changes something: done, done twice, lost, late, done but not answered, or with a crash around it."""
        if self.dice.fault(0.02):
            raise Crash("before the call")
        if self.clock.now() < self.silent_until:
            raise Unavailable("Ray does not answer")
        fate, self.calls = self.calls, "done"
        if self.dice.fault(0.05) or fate == "late":
            self.late.append((self.clock.now() + self.dice.between(0.5, 40), lambda: effect(True)))
            raise Unavailable("timed out; the call is still under way")
        if self.dice.fault(0.03) or fate == "lost":
            raise Unavailable("lost")
        effect(False)
        if self.dice.fault(0.05) or fate == "twice":
            effect(False)
        if self.dice.fault(0.03):
            raise Unavailable("done, but the answer was lost")
        if self.dice.fault(0.02):
            raise Crash("after the call")


def _stale(group: SimGroup, fence: int, late: bool) -> bool:
    """Follows a newer server, refuses an older one. A late call has nobody who waits for its answer."""
    if fence >= group.group.fence:
        group.group = replace(group.group, fence=fence)
        return False
    if late:
        return True
    raise LeaseLost(f"lease {fence} is over, {group.group.fence} leads")
