"""PURE: blame for a group in which nothing goes on: the rank that is not where the others wait for it.

Evidence in this order: a stopped process (it cannot come), a rank that has left, the Python stacks of all ranks (who is not in the
collective, and whether a data loader process holds it up), the number of steps. Where none of these points at one rank, none is blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from workers.messages import FailureClass, ProcessStack, RankReport, RankStacks
from workers.verdict import Verdict
from workers.watching import STOPPED

# Where a rank waits for others: parts of "function (file:line)" of its innermost frames.
COLLECTIVES = (
    "(torch/distributed/",
    "_engine_run_backward (torch/autograd/graph.py",  # the gradients' all-reduce; code of the user's own would be further inside
    "(torch/nn/parallel/distributed.py",
    "(torch/cuda/nccl.py",
    "(tensorflow/python/eager/execute.py",
    "(tensorflow/python/eager/context.py",
    "(jax/experimental/multihost_utils.py",
    "(jax/_src/array.py",
    "(workers/agreement.py",
)
LOADER = ("(torch/utils/data/dataloader.py",)
LOADER_IDLE = ("(multiprocessing/queues.py",)  # it waits for work
INNERMOST = 8  # frames that tell what a process does
TEXT_OF_RANK, TEXT_OF_ALL = 4096, 32_768  # characters of stacks that an incident keeps


def judge_hang(ranks: Sequence[RankReport], stacks: Mapping[int, RankStacks], what: str, since: float) -> Verdict:
    """``what``: the silence in words; ``since``: Unix time of the last sign of life. ``stacks`` may lack ranks."""
    blamed, why, kind, place = _blame(ranks, stacks)
    named = f"rank {blamed.rank} is blamed: {why}" if blamed is not None else why
    if blamed is not None and blamed.drill:
        kind = FailureClass.INFRASTRUCTURE
    signature = f"hang at {place}" if place else f"hang rank {blamed.rank}" if blamed is not None else "hang"
    rank = None if blamed is None else blamed.rank
    own = stacks.get(rank) if rank is not None else None
    return Verdict(
        kind,
        "hang",
        rank,
        f"{what}; {named}",
        signature,
        since,
        excerpt=(own.text if own is not None else "") or (blamed.tail if blamed is not None else ""),
        drill=blamed.drill if blamed is not None else None,
        stacks=kept_stacks(stacks, rank),
    )


def kept_stacks(stacks: Mapping[int, RankStacks], first: int | None) -> dict[int, str]:
    """Their texts within the limits, that of the blamed rank before all others."""
    texts: dict[int, str] = {}
    room = TEXT_OF_ALL
    for rank in sorted(stacks, key=lambda r: (r != first, r)):
        text = stacks[rank].text[:TEXT_OF_RANK]
        if len(text) > room:
            break
        texts[rank], room = text, room - len(text)
    return dict(sorted(texts.items()))


def in_collective(stack: ProcessStack) -> bool:
    """It waits for other ranks."""
    return _has(stack.frames[:INNERMOST], COLLECTIVES)


def _inner(stack: ProcessStack) -> Sequence[str]:
    """What the user's innermost line has called; it may be deep."""
    return stack.frames[: stack.frames.index(stack.place)] if stack.place in stack.frames else stack.frames


def _has(frames: Sequence[str], parts: Sequence[str]) -> bool:
    return any(part in frame for frame in frames for part in parts)


Blame = tuple[RankReport | None, str, FailureClass, str | None]  # rank, why, class, place


def _blame(ranks: Sequence[RankReport], stacks: Mapping[int, RankStacks]) -> Blame:
    unknown = FailureClass.UNKNOWN
    stopped = [r for r in ranks if r.os_state == STOPPED]
    if stopped:
        return stopped[0], "its process is stopped (SIGSTOP)", FailureClass.INFRASTRUCTURE, None
    left = [r for r in ranks if r.exit_code == 0]
    if left:
        return left[0], "it has ended with 0", unknown, None
    by_step = sorted(ranks, key=lambda r: (r.step or 0, r.rank))
    seen = [r for r in by_step if r.rank in stacks and stacks[r.rank].own.frames]
    outside = [r for r in seen if not in_collective(stacks[r.rank].own)]
    if outside and (len(outside) < len(seen) or len(ranks) == 1):
        return _outside(outside, stacks)
    drilled = [r for r in ranks if r.drill == "hang"]
    if drilled:
        return drilled[0], "a drill made its main thread pause, inside of the collective", FailureClass.INFRASTRUCTURE, None
    if by_step and (by_step[0].step or 0) < (by_step[-1].step or 0):
        return by_step[0], "it is the furthest behind", unknown, _place(stacks, by_step[0])
    places = Counter(place for r in seen if (place := _place(stacks, r)) is not None)
    if len(places) > 1:
        told = ", ".join(f"rank {r.rank} at {_place(stacks, r)}" for r in seen[:4])
        (most, _), *_, (fewest, count) = places.most_common()
        odd = [r for r in seen if _place(stacks, r) == fewest]
        if count == 1 and places[most] > 1:
            return odd[0], f"it waits at another place than the others: {told}", unknown, fewest
        return None, f"the ranks wait at different places: {told}", unknown, min(places)
    return None, "no rank stands out", unknown, next(iter(places), None)


def _outside(outside: Sequence[RankReport], stacks: Mapping[int, RankStacks]) -> Blame:
    """At least one rank is not in the collective."""
    rank = outside[0]
    own = stacks[rank.rank].own
    more = f" (nor are ranks {', '.join(str(r.rank) for r in outside[1:5])})" if len(outside) > 1 else ""
    if _has(_inner(own), LOADER):
        for child in stacks[rank.rank].children:
            if child.os_state == STOPPED:
                why = f"it waits for its data loader process {child.pid}, which is stopped (SIGSTOP)"
                return rank, why + more, FailureClass.INFRASTRUCTURE, _place(stacks, rank)
        busy = [c for c in stacks[rank.rank].children if c.frames and not _has(c.frames[:INNERMOST], LOADER_IDLE)]
        if busy:
            why = f"it waits for its data loader process {busy[0].pid}, which is in {busy[0].frames[0]}"
            return rank, why + more, FailureClass.UNKNOWN, busy[0].place
    at = f", called at {own.place}" if own.place and own.place not in own.frames[0] else ""
    return rank, f"it is not in the collective but in {own.frames[0]}{at}{more}", FailureClass.UNKNOWN, own.place


def _place(stacks: Mapping[int, RankStacks], rank: RankReport) -> str | None:
    found = stacks.get(rank.rank)
    return found.own.place if found is not None else None
