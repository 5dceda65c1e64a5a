"""Gang placement: who starts where, and why the others wait."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.model import Job, Node, NodeState
from orchestrator.core.scheduling import BACKFILL_S, NodeRoom, Placement, Room, Waiting, order, rooms, schedule, suspects
from orchestrator.core.states import AttemptState
from tests.core.make import NOW, attempt, job, node, seen, spec
from workers.messages import FailureClass, Incident, NodePlace, Outcome


def want(name: str, nodes: int = 1, cpus: float = 1, gpus: int = 0, memory_gb: float = 1, **changes: Any) -> Job:
    resources = {"nodes": nodes, "cpus_per_node": cpus, "gpus_per_node": gpus, "memory_gb": memory_gb}
    return job(id=name, spec=spec(resources=resources, priority=changes.pop("priority", 50)), **changes)


def room(id: str, cpus: float, gpus: int = 0, free: float | None = None) -> NodeRoom:
    return NodeRoom(id, Room(cpus, gpus, 8), Room(cpus if free is None else free, gpus, 8))


def run(jobs: list[Job], nodes: list[NodeRoom] | None, waited: float = 0) -> dict[str, Any]:
    answers = schedule(jobs, {j.id: NOW - waited for j in jobs}, nodes, NOW)
    return {name: [n.node_id for n in a.nodes] if isinstance(a, Placement) else str(a.reason) for name, a in answers.items()}


TENTHS = [want(c, cpus=0.1, memory_gb=0.1) for c in "abcdefghij"]
HALF_FREE = room("n1", 4, free=2)
ONE, TWO = [room("n1", 2)], [room("n1", 2), room("n2", 4)]
ROOM, NODES = "WaitingForRoom", "WaitingForNodes"
CASES: list[tuple[str, list[Job], list[NodeRoom] | None, float, dict[str, Any]]] = [
    ("fits", [want("a")], ONE, 0, {"a": ["n1"]}),
    ("one bundle per node, never two on one", [want("a", nodes=2)], ONE, 0, {"a": NODES}),
    ("all nodes or none", [want("a", nodes=2, cpus=3)], TWO, 0, {"a": NODES}),
    ("best fit", [want("a", cpus=2)], TWO, 0, {"a": ["n1"]}),
    ("best fit leaves GPUs alone", [want("a")], [room("n1", 2, gpus=4), room("n2", 9)], 0, {"a": ["n2"]}),
    ("ties by id", [want("a")], [room("n2", 2), room("n1", 2)], 0, {"a": ["n1"]}),
    ("what is given is gone", [want("a", cpus=2), want("b", cpus=1)], ONE, 0, {"a": ["n1"], "b": ROOM}),
    ("the oldest first", [want("a", cpus=2, created_at=NOW), want("b", cpus=2, created_at=NOW - 1)], ONE, 0, {"a": ROOM, "b": ["n1"]}),
    ("priority before age", [want("a", cpus=2, priority=51), want("b", cpus=2, created_at=0.0)], ONE, 0, {"a": ["n1"], "b": ROOM}),
    ("a small one may pass", [want("a", cpus=4), want("b")], [HALF_FREE], 0, {"a": ROOM, "b": ["n1"]}),
    ("but not for ever", [want("a", cpus=4), want("b")], [HALF_FREE], BACKFILL_S, {"a": ROOM, "b": ROOM}),
    ("but where the other could never", [want("a", cpus=4), want("b")], [HALF_FREE, room("n2", 2)], BACKFILL_S, {"a": ROOM, "b": ["n2"]}),
    ("one that never fits holds up nobody", [want("a", gpus=1), want("b")], ONE, BACKFILL_S, {"a": NODES, "b": ["n1"]}),
    ("no node at all", [want("a")], [], 0, {"a": NODES}),
    ("Ray does not answer", [want("a")], None, 0, {"a": "Unreachable"}),
    ("fractions of a core add up", TENTHS, [room("n1", 1)], 0, {c: ["n1"] for c in "abcdefghij"}),
]  # fmt: skip


@pytest.mark.parametrize(("jobs", "nodes", "waited", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_who_starts(jobs: list[Job], nodes: list[NodeRoom] | None, waited: float, expected: dict[str, Any]) -> None:
    assert run(jobs, nodes, waited) == expected


def test_why_one_waits() -> None:
    jobs = [want("a", cpus=2, created_at=1.0), want("b", nodes=2, cpus=2, memory_gb=2)]
    answers = schedule(jobs, {"a": NOW, "b": NOW}, [room("n1", 2), room("n2", 2)], NOW)
    assert answers["b"] == Waiting(
        "WaitingForRoom",
        "needs 2 nodes x (2 CPU, 0 GPU, 2 GiB); 1 of 2 ready nodes have that free, largest free (2 CPU, 0 GPU, 8 GiB); position 2",
    )
    answers = schedule([want("a", cpus=9)], {"a": NOW}, TWO, NOW)
    assert answers["a"].message.endswith(
        "even when idle only 0 of 2 ready nodes are large enough, the largest is (4 CPU, 0 GPU, 8 GiB); position 1"
    )


def test_a_head_without_cores_is_no_place_for_jobs() -> None:
    assert [found.id for found in rooms([node("head", cpus=0), node("n1")], [], {})] == ["n1"]


def test_places_count_from_zero() -> None:
    placement = schedule([want("a", nodes=2)], {"a": NOW}, TWO, NOW)["a"]
    assert isinstance(placement, Placement)
    assert [(n.index, n.node_id) for n in placement.nodes] == [(0, "n1"), (1, "n2")]


@pytest.mark.parametrize(
    ("avoided", "count", "placed"),
    [
        ((), 1, ["n1"]),
        (("n1",), 1, ["n2"]),
        (("n1", "n2", "n3"), 1, ["n1"]),  # all are: better than to wait for ever
        (("n1",), 3, ["n2", "n3", "n1"]),
        (("other",), 1, ["n1"]),
    ],
)
def test_a_retry_goes_elsewhere(avoided: tuple[str, ...], count: int, placed: list[str]) -> None:
    answer = schedule([want("a", nodes=count)], {"a": NOW}, [room(n, 2) for n in ("n1", "n2", "n3")], NOW, {"a": avoided})["a"]
    assert isinstance(answer, Placement)
    assert [place.node_id for place in answer.nodes] == placed


LOST = {"state": AttemptState.ENDED, "outcome": Outcome.LOST, "nodes": (NodePlace(0, "n1"), NodePlace(1, "n2"))}


@pytest.mark.parametrize(
    ("of_attempt", "blamed", "expected"),
    [
        (None, None, set()),
        (LOST, None, {"n1", "n2"}),  # it never trained, and nobody knows why
        (LOST, "n2", {"n2"}),
        (LOST | {"started_at": NOW - 9}, "n2", {"n2"}),
        (LOST | {"started_at": NOW - 9}, None, set()),  # it trained there
        (LOST | {"outcome": Outcome.STOPPED}, "n2", set()),
    ],
)
def test_which_nodes_are_suspect(of_attempt: dict[str, Any] | None, blamed: str | None, expected: set[str]) -> None:
    incident = Incident("job-aaaaaaaaaaaa", 1, 0, NOW, "node_lost", FailureClass.INFRASTRUCTURE, "", "relaunch", blamed_node=blamed)
    known = job(open_incidents=(incident,) if blamed else ())
    assert suspects(known, None if of_attempt is None else attempt(**of_attempt)) == expected


KEY = ("job-aaaaaaaaaaaa", 1)
FREE: list[tuple[str, Node, dict[str, Any], bool, float | None]] = [
    ("idle", node("n1"), {}, False, 2),
    ("reserved, Ray does not know yet", node("n1"), {"state": AttemptState.PLANNED}, False, 1),
    ("reserved, Ray knows", node("n1", free_cpus=1), {"state": AttemptState.ACTIVE}, True, 1),
    ("reserved, Ray knows and has strangers", node("n1", free_cpus=0.5), {"state": AttemptState.ACTIVE}, True, 0.5),
    ("an attempt that ended holds nothing", node("n1"), {"state": AttemptState.ENDED}, False, 2),
    ("one that is being removed does", node("n1"), {"state": AttemptState.REMOVING}, False, 1),
    ("cordoned", node("n1", state=NodeState.CORDONED), {}, False, None),
    ("unreachable", node("n1", state=NodeState.UNREACHABLE), {}, False, None),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "of_attempt", "known", "free"), [row[1:] for row in FREE], ids=[row[0] for row in FREE])
def test_free_room(machine: Node, of_attempt: dict[str, Any], known: bool, free: float | None) -> None:
    attempts = [attempt(**of_attempt)] if of_attempt else []
    found = rooms([machine], attempts, {KEY: seen()} if known else {})
    assert [r.free.cpus for r in found] == ([] if free is None else [free])


def test_many_jobs_on_many_nodes_are_placed_as_one_by_one_would_be() -> None:
    """Against the rule itself, word for word: the fullest node that holds the job, then the lower id."""
    jobs = [want(f"{number:03}", cpus=1 + number * 7 % 5, nodes=1 + number % 3) for number in range(60)]
    nodes = [room(f"n{number:03}", 6, free=number % 7) for number in range(80)]
    free = {node.id: node.free.cpus for node in nodes}
    answers = schedule(jobs, {each.id: 0.0 for each in jobs}, nodes, 0.0)
    placed = 0
    for each in sorted(jobs, key=order):
        need, count = each.spec.resources.cpus_per_node, each.spec.resources.nodes
        fitting = sorted((left - need, name) for name, left in free.items() if left >= need)
        answer = answers[each.id]
        if len(fitting) < count:
            assert isinstance(answer, Waiting)
            assert f"{len(fitting)} of 80 ready nodes" in answer.message
            continue
        assert isinstance(answer, Placement)
        assert [place.node_id for place in answer.nodes] == [name for _, name in fitting[:count]]
        placed += 1
        for place in answer.nodes:
            free[place.node_id] -= need
    assert 10 < placed < 60
