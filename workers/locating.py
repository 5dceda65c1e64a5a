"""PURE: which state the memory of the nodes holds, which step they could make whole together, and which checkpoints are passed over.

Invariants: a step counts only where every rank's own part of it is somewhere, and every array that all ranks share; the arrays that the
ranks share are split over the ranks of a node in the same way on every node, so ranks of the same local number hold the same of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from workers.group import Group, Seen
from workers.messages import CheckpointFound, Fetch, Problem, RestoreOrder, Source, Unfit

POISONED = Problem(Unfit.UNWANTED, "its metrics were not finite")


@dataclass(frozen=True)
class FromPeers:
    """A step that is whole as soon as these ranks have fetched what they lack."""

    step: int
    fetches: tuple[Fetch, ...]


def newest_in_memory(group: Group, seen: Seen) -> int | None:
    """Newest step whose snapshot is complete and valid for every rank, each on its own node."""
    held: dict[int, set[int]] = {}
    for agent in seen.agents:
        for h in agent.status.holdings if agent.status else ():
            if h.valid:
                held.setdefault(h.rank, set()).add(h.step)
    if len(held) < group.spec.world_size:
        return None
    return max(set.intersection(*held.values()), default=None)


def without_storage(group: Group, seen: Seen) -> RestoreOrder | None:
    """The newest state that the nodes have, or can make whole together."""
    peers, memory = from_peers(group, seen), newest_in_memory(group, seen)
    if peers is not None:
        return RestoreOrder(Source.PEER, peers.step)
    return RestoreOrder(Source.MEMORY, memory) if memory is not None else None


def whole_in_memory(group: Group, seen: Seen, step: int) -> bool:
    """Every rank's snapshot of ``step`` is complete and valid on its own node."""
    held = {h.rank for a in seen.agents if a.status for h in a.status.holdings if h.valid and h.step == step}
    return len(held) == group.spec.world_size


def from_peers(group: Group, seen: Seen) -> FromPeers | None:
    """The newest step that is not whole in memory but can be made so; None where there is none newer than what memory holds."""
    parts = _parts(group, seen)
    for step in sorted(parts, reverse=True):
        if len(parts[step].whole) == group.spec.world_size:
            return None
        if step in group.unfetched:
            continue
        fetches = _fetches(group, parts[step])
        if fetches is not None:
            return FromPeers(step, fetches)
    return None


@dataclass
class _Parts:
    """Who holds what of one step."""

    whole: set[int] = field(default_factory=set)  # ranks whose slots hold all of it
    repairable: set[int] = field(default_factory=set)  # ranks whose slots hold their own part
    own: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # rank -> nodes with a copy of its own part
    shared: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # local rank -> nodes with its part of the shared arrays


def _parts(group: Group, seen: Seen) -> dict[int, _Parts]:
    found: dict[int, _Parts] = defaultdict(_Parts)
    per_node = group.spec.processes_per_node
    for agent in seen.agents:
        if agent.status is None:
            continue
        for held in agent.status.holdings:
            if held.valid:
                found[held.step].whole.add(held.rank)
            if held.own_valid:
                found[held.step].repairable.add(held.rank)
            if held.shared_valid:
                found[held.step].shared[held.rank % per_node].add(agent.index)
        for copy in agent.status.copies:
            found[copy.step].own[copy.rank].add(agent.index)
            if copy.whole:
                found[copy.step].shared[copy.rank % per_node].add(agent.index)
    return found


def _fetches(group: Group, parts: _Parts) -> tuple[Fetch, ...] | None:
    """What each rank lacks and where it is; None where it is nowhere."""
    fetches = []
    for rank in range(group.spec.world_size):
        if rank in parts.whole:
            continue
        home, local = divmod(rank, group.spec.processes_per_node)
        own = () if rank in parts.repairable else _nearest(group, home, parts.own[rank])
        shared = _nearest(group, home, parts.shared[local])
        if not shared or (not own and rank not in parts.repairable):
            return None
        fetches.append(Fetch(rank, own, shared))
    return tuple(fetches)


def _nearest(group: Group, home: int, nodes: set[int]) -> tuple[int, ...]:
    """A rank's own node first, then the nodes after it, so that not all ask the same one."""
    count = len(group.spec.nodes)
    return tuple(sorted(nodes, key=lambda node: (node - home) % count))


def leave_poisoned(group: Group, now: float, catalog: tuple[CheckpointFound, ...]) -> Group:
    """A job that stops at metrics that are not finite would do so again from a checkpoint that was taken then."""
    barred = group.barred
    sound = [c for c in catalog if c.problem is None and c.url not in barred]
    taken = next((c for c in sound if c.finite), None)
    if not group.spec.stop_on_nan or taken is None or taken is sound[0]:
        return group
    left = tuple(replace(c, problem=POISONED) for c in sound[: sound.index(taken)])
    group = group.say(now, "RolledBack", f"metrics were not finite at step {left[-1].step}: back to the checkpoint of step {taken.step}")
    return replace(group, excluded=(*group.excluded, *left))


def pass_over(group: Group, now: float, damaged: CheckpointFound) -> Group:
    """The one before it is the next to be taken."""
    group = group.say(now, "CheckpointSkipped", f"step {damaged.step} at {damaged.url} cannot be used: {damaged.problem}")
    return replace(group.checked(now, damaged.url, str(damaged.problem)), excluded=(*group.excluded, damaged))


def newest_generation(group: Group, seen: Seen) -> int:
    """Coordinator and agents may have gone at once, and what they kept with them: what storage and snapshots tell keeps ages monotone."""
    held = [h.generation for a in seen.agents if a.status for h in a.status.holdings]
    return max([group.generation, seen.past_generation, *held])
