"""What the memory of two nodes holds, and which step they can make whole together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.make import NOW, committed, found, group, held, idle, look, recovery, said, short, spec, status, with_memory
from workers.failing import LAUNCH_S
from workers.group import AgentSeen, Doing, FetchPeers, Group, Launch, ReadCatalog, Seen, Stage
from workers.locating import from_peers, newest_in_memory
from workers.messages import AgentStatus, Copy, Fetch, Outcome, RestoreOrder, Source
from workers.restart import decide

PEER_40 = RestoreOrder(Source.PEER, 40)


def node(index: int, *holdings: Any, copies: tuple[tuple[int, int], ...] = (), kept: tuple[int, ...] = (), **changes: Any) -> AgentStatus:
    """One rank per node. ``copies``: (rank, step) held for a neighbour; ``kept``: steps of its own memory checkpoints."""
    all_copies = (*(Copy(r, s, False) for r, s in copies), *(Copy(index, s, True) for s in kept))
    return status(index, holdings=holdings, copies=all_copies, **changes)


# Node 1 has lost all it had; node 0 holds the memory checkpoint of step 20 with what is rank 1's own.
WIPED = look(node(0, held(0, 39), held(0, 40), kept=(20,), copies=((1, 20),)), node(1))
FROM_GUARD = (Fetch(0, (0,), (0,)), Fetch(1, (0,), (0,)))


@pytest.mark.parametrize(
    ("seen", "step"),
    [
        (with_memory((39, 40), (39, 40)), 40),
        (with_memory((39, 40), (38, 39)), 39),
        (with_memory((40,), (39,)), None),
        (with_memory((40,), ()), None),
        (with_memory((), ()), None),
        (look(status(0, holdings=(held(0, 40),)), AgentSeen(1, None)), None),
        (look(status(0, holdings=(held(0, 40), held(0, 39))), status(1, holdings=(held(1, 40, valid=False), held(1, 39)))), 39),
        (look(status(0, holdings=(held(0, 40, shared=False), held(0, 39))), status(1, holdings=(held(1, 40), held(1, 39)))), 39),
    ],
)
def test_newest_step_that_all_ranks_hold(seen: Seen, step: int | None) -> None:
    assert newest_in_memory(group(Doing.LOCATING), seen) == step


@pytest.mark.parametrize(
    ("seen", "step", "fetches"),
    [
        pytest.param(with_memory((39, 40), (39, 40)), None, (), id="whole in memory"),
        pytest.param(
            look(node(0, held(0, 40, shared=False)), node(1, held(1, 40))), 40, (Fetch(0, (), (1,)),), id="a shared part is damaged"
        ),
        pytest.param(
            look(node(0, held(0, 40, shared=False), held(0, 39)), node(1, held(1, 40), held(1, 39))),
            40,
            (Fetch(0, (), (1,)),),
            id="repair before the step that is whole",
        ),
        pytest.param(look(node(0, held(0, 40, own=False)), node(1, held(1, 40))), None, (), id="nobody has what is a rank's own"),
        pytest.param(look(node(0, held(0, 40, shared=False)), node(1, held(1, 40, shared=False))), None, (), id="all replicas are damaged"),
        pytest.param(
            look(node(0, held(0, 40, own=False), held(0, 39)), node(1, held(1, 40), held(1, 39))), None, (), id="the step before is whole"
        ),
        pytest.param(WIPED, 20, FROM_GUARD, id="a node lost its memory"),
        pytest.param(
            look(node(0, held(0, 40), kept=(40,), copies=((1, 40),)), node(1)), 40, (Fetch(1, (0,), (0,)),), id="only the lost one fetches"
        ),
        pytest.param(
            look(node(0, kept=(20, 40), copies=((1, 20),)), node(1, kept=(20,))),
            20,
            (Fetch(0, (0,), (0, 1)), Fetch(1, (1, 0), (1, 0))),
            id="a set",
        ),
        pytest.param(look(node(0, held(0, 40), kept=(40,)), node(1, held(1, 39))), None, (), id="no guard has it"),
        pytest.param(look(node(0, kept=(20,), copies=((1, 20),)), AgentSeen(1, None)), 20, FROM_GUARD, id="the agent said nothing yet"),
    ],
)
def test_what_nodes_can_make_whole_together(seen: Seen, step: int | None, fetches: tuple[Fetch, ...]) -> None:
    plan = from_peers(group(Doing.LOCATING), seen)
    assert (plan.step if plan else None, plan.fetches if plan else ()) == (step, fetches)


def test_ranks_of_the_same_local_number_stand_in_for_each_other() -> None:
    """Two nodes with two ranks each: one lost the first half of the shared arrays, the other one the second half."""
    first = status(0, holdings=(held(0, 40, shared=False), held(1, 40)))
    second = status(1, holdings=(held(2, 40), held(3, 40, shared=False)))
    plan = from_peers(group(Doing.LOCATING, given=spec(processes_per_node=2)), look(first, second))
    assert plan is not None
    assert plan.fetches == (Fetch(0, (), (1,)), Fetch(3, (), (0,)))


def test_a_node_asks_those_after_it_first() -> None:
    agents = [status(i, holdings=(held(i, 40, shared=i not in (1, 2)),)) for i in range(4)]
    plan = from_peers(group(Doing.LOCATING, given=spec(nodes=4)), look(*agents))
    assert plan is not None
    assert plan.fetches == (Fetch(1, (), (3, 0)), Fetch(2, (), (3, 0)))


REPAIR = look(node(0, held(0, 40, shared=False), held(0, 39)), node(1, held(1, 40), held(1, 39)))


@pytest.mark.parametrize(
    ("seen", "changes", "doing", "actions", "reason"),
    [
        pytest.param(REPAIR, {}, Doing.FETCHING, (FetchPeers(40, (Fetch(0, (), (1,)),)),), "FetchingFromPeers", id="repair"),
        pytest.param(
            REPAIR,
            {"unfetched": (40,)},
            Doing.LAUNCHING,
            (Launch(4, RestoreOrder(Source.MEMORY, 39), 41),),
            "Launching",
            id="the repair failed before",
        ),
        pytest.param(WIPED, {}, Doing.FETCHING, (FetchPeers(20, FROM_GUARD),), "FetchingFromPeers", id="from the guard"),
        pytest.param(
            WIPED, {"checkpoints": (committed(20),)}, Doing.FETCHING, (FetchPeers(20, FROM_GUARD),), "FetchingFromPeers", id="tie"
        ),
        pytest.param(
            WIPED, {"checkpoints": (committed(30),)}, Doing.LOCATING, (ReadCatalog(NOW - 10),), "ReadingCatalog", id="storage may be newer"
        ),
        pytest.param(
            look(*(a.status for a in WIPED.agents if a.status), catalog=(found(30), found(20))),
            {"checkpoints": (committed(30),)},
            Doing.STAGING,
            (Stage(found(30).url),),
            "ReadingCheckpoint",
            id="storage is newer",
        ),
        pytest.param(
            look(*(a.status for a in WIPED.agents if a.status), catalog=(found(30, "torn"), found(10))),
            {"checkpoints": (committed(30),)},
            Doing.FETCHING,
            (FetchPeers(20, FROM_GUARD),),
            "FetchingFromPeers",
            id="the newer one in storage is torn",
        ),
        pytest.param(
            look(*(a.status for a in WIPED.agents if a.status), catalog=(found(10),)),
            {"unfetched": (20,)},
            Doing.STAGING,
            (Stage(found(10).url),),
            "ReadingCheckpoint",
            id="the guard's failed, an older one from storage",
        ),
    ],
)
def test_the_freshest_state_is_taken(seen: Seen, changes: dict[str, Any], doing: Doing, actions: Any, reason: str) -> None:
    assert short(decide(group(Doing.LOCATING, **changes), seen, NOW)) == (doing, actions, reason)


def fetching(**changes: Any) -> Group:
    return group(Doing.FETCHING, **{"restore": PEER_40, "recovery": recovery(last_step=40), "mirrored": 20} | changes)


def test_ranks_start_once_every_node_is_whole() -> None:
    decision = decide(fetching(unfetched=(41,)), with_memory((39, 40), (40,)), NOW)
    assert short(decision) == (Doing.LAUNCHING, (Launch(4, PEER_40, 41),), "Launching")
    assert said(decision) == ["PeerStateTaken"]
    assert (decision.group.unfetched, decision.group.mirrored) == ((), 20)
    recovering = decision.group.recovery
    assert recovering is not None
    incident = recovering.incident
    assert (incident.restored_from, incident.resumed_step, incident.lost_steps) == (Source.PEER, 40, 0)


def test_memory_checkpoints_newer_than_what_is_restored_are_void() -> None:
    after = decide(group(Doing.LOCATING, mirrored=60), with_memory((40,), (40,)), NOW).group
    assert (after.doing, after.mirrored) == (Doing.LAUNCHING, None)


@pytest.mark.parametrize(
    ("seen", "since", "problem"),
    [
        (look(node(0, held(0, 40, shared=False), unfetched={40: "no replica"}), node(1, held(1, 40))), NOW - 1, "node 0: no replica"),
        (look(node(0, held(0, 40, shared=False)), node(1, held(1, 40))), NOW - 601, "not done within start_s = 600 s"),
        (look(node(0, held(0, 40, shared=False)), node(1)), NOW - 1, "a copy is gone"),
    ],
)
def test_what_cannot_be_fetched_is_told_and_the_next_best_taken(seen: Seen, since: float, problem: str) -> None:
    decision = decide(fetching(since=since), seen, NOW)
    assert short(decision) == (Doing.LOCATING, (ReadCatalog(NOW),), "ReadingCatalog")
    assert said(decision) == ["PeerStateFailed"]
    assert problem in decision.group.events[0].message


def test_nothing_left_fails_with_the_list_of_storage() -> None:
    seen = look(node(0, held(0, 40, shared=False), unfetched={40: "no"}), node(1, held(1, 40)), catalog=(found(30, "torn"),))
    after = decide(fetching(), seen, NOW).group
    assert (after.outcome, after.reason) == (Outcome.FAILED, "NoValidCheckpoint")


@pytest.mark.parametrize(
    ("seen", "doing"),
    [
        (look(node(0, held(0, 40, shared=False)), AgentSeen(1, node(1, held(1, 40)), NOW - 1, died=True)), Doing.WARMING),
        (look(node(0, held(0, 40, shared=False)), node(1, held(1, 40), stopped=False)), Doing.LOCATING),
        (look(node(0, held(0, 41, shared=False)), node(1, held(1, 41))), Doing.FETCHING),
    ],
)
def test_agents_that_die_or_tell_something_new_while_fetching(seen: Seen, doing: Doing) -> None:
    decision = decide(fetching(), seen, NOW)
    assert decision.group.doing == doing
    assert decision.group.unfetched == ()


@pytest.mark.parametrize(
    ("seen", "doing", "actions"),
    [
        (with_memory((20,), (20,), catalog_problem="EIO"), Doing.LAUNCHING, (Launch(4, RestoreOrder(Source.MEMORY, 20), 41),)),
        (
            look(*(a.status for a in WIPED.agents if a.status), catalog_problem="EIO"),
            Doing.FETCHING,
            (FetchPeers(20, FROM_GUARD),),
        ),
    ],
)
def test_an_older_state_in_memory_is_taken_where_storage_stays_away(seen: Seen, doing: Doing, actions: Any) -> None:
    newer = (committed(30),)
    soon = decide(group(Doing.LOCATING, NOW - LAUNCH_S + 1, checkpoints=newer), seen, NOW)
    assert short(soon) == (Doing.LOCATING, (ReadCatalog(NOW - LAUNCH_S + 1),), "ReadingCatalog")
    late = decide(group(Doing.LOCATING, NOW - LAUNCH_S - 1, checkpoints=newer), seen, NOW)
    assert short(late)[:2] == (doing, actions)
    assert said(late) == ["StorageUnavailable"]
    stuck = decide(group(Doing.STAGING, NOW - 601, checkpoints=newer, restore=RestoreOrder(Source.STORAGE, 30, found(30).url)), seen, NOW)
    assert short(stuck)[:2] == (doing, actions)


def test_fetching_goes_on_until_it_is_seen_to_be_done() -> None:
    decision = decide(fetching(), REPAIR, NOW)
    assert short(decision) == (Doing.FETCHING, (FetchPeers(40, (Fetch(0, (), (1,)),)),), "FetchingFromPeers")
    assert decision.look_again_at == NOW + 1


def test_nothing_to_fetch_on_nodes_without_memory() -> None:
    assert from_peers(group(Doing.LOCATING), idle()) is None
