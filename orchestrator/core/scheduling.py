"""Gang placement: which waiting jobs start now, on which nodes, and why the others wait. PURE.

Invariants: a job is placed on all its nodes or on none, each node at most once; what is given away never exceeds what a node has; the
order is (-priority, age, id); a smaller job may pass one that does not fit (backfill), but once that one has waited for
``BACKFILL_S`` the nodes that it could use are kept for it, so it cannot be starved by jobs behind it. A node on which the last attempt
was lost is taken again only where no others have room: an idle node that fails every launch must not get every retry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.model import Attempt, GroupView, Job, Node, NodeState, Presence
from orchestrator.core.spec import Resources
from orchestrator.core.states import AttemptState, Reason
from workers.messages import NodePlace, Outcome

BACKFILL_S = 300.0
_ROUNDING = 1e-6  # sums of fractions of a core


@dataclass(frozen=True)
class Room:
    """Cores, GPUs and memory in GiB (2^30 bytes) of one node or one bundle."""

    cpus: float
    gpus: float
    memory_gb: float

    def without(self, need: Room) -> Room:
        return Room(self.cpus - need.cpus, self.gpus - need.gpus, self.memory_gb - need.memory_gb)

    def at_most(self, other: Room) -> Room:
        return Room(*(max(0.0, min(pair)) for pair in zip(self._parts(), other._parts(), strict=True)))

    def tightness(self) -> tuple[float, float, float]:
        """Sorts what is scarcest first: GPUs, then cores, then memory."""
        return (self.gpus, self.cpus, self.memory_gb)

    def _parts(self) -> tuple[float, float, float]:
        return (self.cpus, self.gpus, self.memory_gb)

    def __str__(self) -> str:
        return f"({self.cpus:g} CPU, {self.gpus:g} GPU, {self.memory_gb:.4g} GiB)"


@dataclass(frozen=True)
class NodeRoom:
    """A node that takes jobs: all that it has, and what is free of it."""

    id: str
    total: Room
    free: Room


@dataclass(frozen=True)
class Placement:
    nodes: tuple[NodePlace, ...]


@dataclass(frozen=True)
class Waiting:
    reason: Reason
    message: str


def order(job: Job) -> tuple[int, float, str]:
    """Sort key of the queue: high priority first, then the oldest."""
    return (-job.spec.priority, job.created_at, job.id)


def bundle(resources: Resources) -> Room:
    """What one node of the job must hold."""
    return Room(resources.cpus_per_node, resources.gpus_per_node, resources.memory_gb)


def rooms(nodes: Iterable[Node], attempts: Iterable[Attempt], groups: Mapping[tuple[str, int], GroupView]) -> list[NodeRoom]:
    """Free room of each ready node: what no attempt has reserved and Ray has not given away.

    Ray does not yet know of groups that are still being made, so their share is taken from Ray's figure too.
    """
    reserved: dict[str, list[tuple[Room, bool]]] = {}
    for attempt in attempts:
        if attempt.state is AttemptState.ENDED:
            continue
        view = groups.get((attempt.job_id, attempt.number))
        in_ray = view is not None and view.presence is Presence.PRESENT
        share = Room(attempt.cpus_per_node, attempt.gpus_per_node, attempt.memory_gb)
        for place in attempt.nodes:
            reserved.setdefault(place.node_id, []).append((share, in_ray))
    found = []
    for node in sorted(nodes, key=lambda n: n.id):
        if node.state is not NodeState.READY or node.cpus <= 0:  # such as a head that takes no job
            continue
        total = Room(node.cpus, node.gpus, node.memory_gb)
        ours, rays = total, Room(node.free_cpus, node.free_gpus, node.free_memory_gb)
        for share, in_ray in reserved.get(node.id, ()):
            ours = ours.without(share)
            rays = rays if in_ray else rays.without(share)
        found.append(NodeRoom(node.id, total, ours.at_most(rays)))
    return found


def schedule(
    waiting: Sequence[Job],
    since: Mapping[str, float],
    nodes: Sequence[NodeRoom] | None,
    now: float,
    avoided: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Placement | Waiting]:
    """An answer for each waiting job. ``since`` tells since when each waits (Unix seconds); ``nodes`` is None while Ray does not answer;
    ``avoided``: by job, nodes that are taken last."""
    answers: dict[str, Placement | Waiting] = {}
    pool = None if nodes is None else _Pool(nodes)
    for position, job in enumerate(sorted(waiting, key=order), 1):
        if pool is None:
            answers[job.id] = Waiting(Reason.UNREACHABLE, f"the cluster does not answer; position {position}")
            continue
        need, count = bundle(job.spec.resources), job.spec.resources.nodes
        chosen = pool.take(need, count, avoided.get(job.id, ()))
        if chosen is not None:
            answers[job.id] = Placement(tuple(NodePlace(index, node_id) for index, node_id in enumerate(chosen)))
            continue
        answers[job.id] = _why(pool, need, count, position)
        if pool.able(need) >= count and now - since[job.id] >= BACKFILL_S:
            pool.keep(need)
    return answers


def suspects(job: Job, attempt: Attempt | None) -> frozenset[str]:
    """Nodes that may have cost the job its last attempt: the blamed one, else all of an attempt that was lost before it trained."""
    if attempt is None or attempt.outcome is not Outcome.LOST:
        return frozenset()
    blamed = job.open_incidents[-1].blamed_node if job.open_incidents else None
    if blamed is not None:
        return frozenset({blamed})
    return frozenset() if attempt.started_at is not None else frozenset(place.node_id for place in attempt.nodes)


class _Pool:
    """The rooms of all nodes as arrays, so that a thousand jobs are held against a thousand nodes in a tenth of a second. A column is a
    node, in the order of ids; the rows are GPUs, cores and memory, the scarcest first."""

    def __init__(self, nodes: Sequence[NodeRoom]) -> None:
        nodes = sorted(nodes, key=lambda node: node.id)
        self._ids = np.array([node.id for node in nodes])
        self._total = _table(node.total for node in nodes)
        self._free = _table(node.free for node in nodes)
        self._open = np.ones(len(nodes), bool)  # False: kept for a job that has waited too long to be passed
        self._able: dict[Room, NDArray[np.bool_]] = {}  # most jobs ask for what another one asks for too
        self._largest: dict[bool, Room] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, need: Room, count: int, avoided: Collection[str]) -> list[str] | None:
        """Ids of the ``count`` nodes that are left fullest (best fit), ties by id, ``avoided`` ones last; None where fewer have room."""
        (fitting,) = np.nonzero(self._open & _hold(self._free, need))
        if len(fitting) < count:
            return None
        gpus, cpus, memory = self._free[:, fitting] - _column(need)
        last = np.isin(self._ids[fitting], list(avoided))
        chosen = fitting[np.lexsort((memory, cpus, gpus, last))[:count]]  # the last key counts most; it is stable, so ties stay by id
        self._free[:, chosen] -= _column(need)
        self._largest.pop(True, None)
        return [str(node_id) for node_id in self._ids[chosen]]

    def keep(self, need: Room) -> None:
        """For a job that cannot be passed any more: all nodes that it could ever use."""
        self._open &= ~self._able[need]

    def able(self, need: Room) -> int:
        """How many nodes hold it when they are idle."""
        if need not in self._able:
            self._able[need] = _hold(self._total, need)
        return int(self._able[need].sum())

    def fitting(self, need: Room) -> int:
        """How many hold it now, kept ones too."""
        return int(_hold(self._free, need).sum())

    def largest(self, *, free: bool) -> Room:
        """The most that a node has, by what is scarcest first."""
        if free not in self._largest:
            table = self._free if free else self._total
            gpus, cpus, memory = table[:, np.lexsort(table[::-1])[-1]]
            self._largest[free] = Room(cpus, gpus, memory)
        return self._largest[free]


def _column(room: Room) -> NDArray[np.float64]:
    return np.array(room.tightness(), float)[:, None]


def _table(rooms: Iterable[Room]) -> NDArray[np.float64]:
    return np.hstack([np.empty((3, 0)), *map(_column, rooms)])


def _hold(table: NDArray[np.float64], need: Room) -> NDArray[np.bool_]:
    return np.asarray((table + _ROUNDING >= _column(need)).all(axis=0))


def _why(pool: _Pool, need: Room, count: int, position: int) -> Waiting:
    text, queue = f"needs {count} node{'s' if count > 1 else ''} x {need}", f"position {position}"
    if not len(pool):
        return Waiting(Reason.WAITING_FOR_NODES, f"{text}; no node is ready; {queue}")
    able = pool.able(need)
    if able < count:
        return Waiting(
            Reason.WAITING_FOR_NODES,
            f"{text}; even when idle only {able} of {len(pool)} ready nodes are large enough, the largest is {pool.largest(free=False)}; "
            f"{queue}",
        )
    fitting = pool.fitting(need)
    if fitting >= count:
        return Waiting(Reason.WAITING_FOR_ROOM, f"{text}; free nodes are kept for a job that waits longer; {queue}")
    return Waiting(
        Reason.WAITING_FOR_ROOM,
        f"{text}; {fitting} of {len(pool)} ready nodes have that free, largest free {pool.largest(free=True)}; {queue}",
    )
