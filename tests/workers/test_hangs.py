"""Blame of a hang: ranks, their states and Python stacks -> the rank that is not where the others wait for it, and why."""

from __future__ import annotations

import pytest

from tests.workers.make import NOW, ended, rank, stacks
from workers.hangs import TEXT_OF_ALL, TEXT_OF_RANK, judge_hang, kept_stacks
from workers.messages import FailureClass, ProcessStack, RankReport, RankStacks

UNKNOWN, INFRASTRUCTURE = FailureClass.UNKNOWN, FailureClass.INFRASTRUCTURE
REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3252)", "wrapper (torch/distributed/c10d_logger.py:83)", "main (train.py:20)")
BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:979)", "backward (torch/_tensor.py:623)", "main (train.py:18)")
BARRIER = ("barrier (torch/distributed/distributed_c10d.py:5356)", "main (train.py:30)")
SLEEPS = ("stuck (train.py:7)", "main (train.py:19)")
IN_BACKWARD = ("backward (layers.py:40)", *BACKWARD)
LOADER = (
    "select (selectors.py:415)",
    "wait (multiprocessing/connection.py:947)",
    "get (multiprocessing/queues.py:113)",
    "_try_get_data (torch/utils/data/dataloader.py:1291)",
    "main (train.py:12)",
)
IDLE = ("select (selectors.py:415)", "wait (multiprocessing/connection.py:947)", "get (multiprocessing/queues.py:113)")
# A forked process shows below its own frames those of the rank that made it.
IDLE_CHILD = ProcessStack(
    900, "S", (*IDLE, "_worker_loop (torch/utils/data/_utils/worker.py:334)", "main (train.py:12)"), "main (train.py:12)"
)
BUSY_CHILD = ProcessStack(901, "S", ("__getitem__ (data.py:5)", "fetch (torch/utils/data/_utils/fetch.py:54)"), "__getitem__ (data.py:5)")
STOPPED_CHILD = ProcessStack(902, "T", ("__getitem__ (data.py:5)",), "__getitem__ (data.py:5)")


def at(number: int, frames: tuple[str, ...], *children: ProcessStack) -> RankStacks:
    own = next((f for f in frames if "train.py" in f or "layers.py" in f), None)
    return stacks(number, *frames, place=own, children=children)


@pytest.mark.parametrize(
    ("ranks", "seen", "blamed", "kind", "why"),
    [
        pytest.param([rank(0, step=10), rank(1, os_state="T")], [], 1, INFRASTRUCTURE, "its process is stopped (SIGSTOP)", id="stopped"),
        pytest.param([ended(0), rank(1, os_state="T")], [], 1, INFRASTRUCTURE, "its process is stopped (SIGSTOP)", id="stopped first"),
        pytest.param(
            [rank(0), rank(1, os_state="T")],
            [at(0, SLEEPS), at(1, REDUCE)],
            1,
            INFRASTRUCTURE,
            "its process is stopped (SIGSTOP)",
            id="stopped in the collective, while another is outside",
        ),
        pytest.param([rank(0, step=10), ended(1)], [at(0, REDUCE)], 1, UNKNOWN, "it has ended with 0", id="left"),
        pytest.param(
            [rank(0), rank(1)],
            [at(0, BACKWARD), at(1, SLEEPS)],
            1,
            UNKNOWN,
            "it is not in the collective but in stuck (train.py:7)",
            id="outside of the collective",
        ),
        pytest.param(
            [rank(0), rank(1, step=39)],
            [at(0, SLEEPS), at(1, REDUCE)],
            0,
            UNKNOWN,
            "it is not in the collective but in stuck (train.py:7)",
            id="the stack says more than the step",
        ),
        pytest.param(
            [rank(0), rank(1)],
            [at(0, BACKWARD), at(1, IN_BACKWARD)],
            None,
            UNKNOWN,
            "the ranks wait at different places",
            id="user code inside of backward",
        ),
        pytest.param(
            [rank(0), rank(1), rank(2)],
            [at(0, SLEEPS), at(1, REDUCE), at(2, SLEEPS)],
            0,
            UNKNOWN,
            "it is not in the collective but in stuck (train.py:7) (nor are ranks 2)",
            id="two are outside",
        ),
        pytest.param(
            [rank(0), rank(1)],
            [at(0, REDUCE), at(1, LOADER, IDLE_CHILD, BUSY_CHILD)],
            1,
            UNKNOWN,
            "it waits for its data loader process 901, which is in __getitem__ (data.py:5)",
            id="a data loader process that does not come back",
        ),
        pytest.param(
            [rank(0), rank(1)],
            [at(0, REDUCE), at(1, LOADER, BUSY_CHILD, STOPPED_CHILD)],
            1,
            INFRASTRUCTURE,
            "it waits for its data loader process 902, which is stopped (SIGSTOP)",
            id="a stopped data loader process",
        ),
        pytest.param([rank(0)], [at(0, SLEEPS)], 0, UNKNOWN, "it is not in the collective but in stuck (train.py:7)", id="the only rank"),
        pytest.param([rank(0), rank(1, step=39)], [], 1, UNKNOWN, "it is the furthest behind", id="no stacks, a step behind"),
        pytest.param(
            [rank(0), rank(1, step=39)], [at(0, REDUCE), at(1, REDUCE)], 1, UNKNOWN, "it is the furthest behind", id="all wait, one behind"
        ),
        pytest.param([rank(0), rank(1, step=None)], [], 1, UNKNOWN, "it is the furthest behind", id="no first step"),
        pytest.param([rank(0), rank(1, step=39, drill="stop")], [], 1, INFRASTRUCTURE, "it is the furthest behind", id="a drill"),
        pytest.param(
            [rank(0), rank(1), rank(2)],
            [at(0, REDUCE), at(1, BARRIER), at(2, REDUCE)],
            1,
            UNKNOWN,
            "it waits at another place than the others: rank 0 at main (train.py:20), rank 1 at main (train.py:30)",
            id="one is in another collective",
        ),
        pytest.param(
            [rank(0), rank(1)],
            [at(0, REDUCE), at(1, BARRIER)],
            None,
            UNKNOWN,
            "the ranks wait at different places: rank 0 at main (train.py:20), rank 1 at main (train.py:30)",
            id="two in different collectives",
        ),
        pytest.param([rank(0), rank(1)], [], None, UNKNOWN, "no rank stands out", id="nothing is known"),
        pytest.param([rank(0), rank(1)], [at(0, REDUCE), at(1, REDUCE)], None, UNKNOWN, "no rank stands out", id="all at the same place"),
        pytest.param([rank(0), rank(1)], [at(0, SLEEPS), at(1, SLEEPS)], None, UNKNOWN, "no rank stands out", id="all outside"),
    ],
)
def test_blame_of_a_hang(ranks: list[RankReport], seen: list[RankStacks], blamed: int | None, kind: FailureClass, why: str) -> None:
    verdict = judge_hang(ranks, {s.rank: s for s in seen}, "no step for 12.3 s", NOW - 12)
    assert (verdict.cause, verdict.rank, verdict.kind, verdict.at) == ("hang", blamed, kind, NOW - 12)
    named = "" if blamed is None else f"rank {blamed} is blamed: "
    assert verdict.evidence.startswith(f"no step for 12.3 s; {named}{why}")


def test_the_blamed_ranks_stack_is_the_excerpt_and_all_are_kept() -> None:
    verdict = judge_hang([rank(0), rank(1)], {0: at(0, REDUCE), 1: at(1, SLEEPS)}, "silent", NOW)
    assert verdict.excerpt == "\n".join(SLEEPS)
    assert verdict.stacks == {0: "\n".join(REDUCE), 1: "\n".join(SLEEPS)}


def test_the_same_place_has_the_same_signature_on_another_rank() -> None:
    one = judge_hang([rank(0), rank(1)], {0: at(0, REDUCE), 1: at(1, SLEEPS)}, "silent", NOW)
    other = judge_hang([rank(0), rank(1)], {0: at(0, SLEEPS), 1: at(1, REDUCE)}, "silent", NOW + 9)
    elsewhere = judge_hang([rank(0), rank(1)], {0: at(0, ("wait (train.py:90)",)), 1: at(1, REDUCE)}, "silent", NOW)
    assert one.signature == other.signature == "hang at stuck (train.py:7)"
    assert elsewhere.signature != one.signature


def test_stacks_are_kept_within_limits_the_blamed_first() -> None:
    long = {n: stacks(n, "x" * 2 * TEXT_OF_RANK) for n in range(50)}
    kept = kept_stacks(long, first=40)
    assert 40 in kept
    assert all(len(text) == TEXT_OF_RANK for text in kept.values())
    assert sum(map(len, kept.values())) == TEXT_OF_ALL
