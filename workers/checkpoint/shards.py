"""Shards of arrays: which pieces of saved shards make up a wanted one. PURE.

In a state tree a shard is a node ``{SHARDED: global shape, "placements": names, "pieces": [[offset, array], ...]}``; a rank saves one
piece, and the pieces of several ranks make one node. An offset is None where the piece is no box of the whole: such a node serves only the
layout that wrote it. Values that lie whole on one rank or another are a node ``{SCATTERED: {key: value}}``. Invariant: a plan covers every
element of the wanted box once, or there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.checkpoint.tree import StateError

SHARDED = "keepstep:sharded"
SCATTERED = "keepstep:scattered"


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an array: ``offset`` and ``shape`` in elements by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Copy:
    """Take ``source`` of the piece with number ``piece`` into ``target`` of the wanted array; both relative to their own beginning."""

    piece: int
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def recut(wanted: Box, pieces: Sequence[Box]) -> list[Copy]:
    """How to fill ``wanted``. Pieces may overlap, as replicas do; the first one serves. Raises StateError where elements are missing."""
    copies = []
    missing = [wanted] if wanted.size else []
    for number, piece in enumerate(pieces):
        left: list[Box] = []
        for box in missing:
            common = overlap(box, piece)
            if common is None:
                left.append(box)
                continue
            copies.append(Copy(number, _within(common, piece), _within(common, wanted)))
            left += _without(box, common)
        missing = left
    if missing:
        lacking = sum(box.size for box in missing)
        raise StateError(f"{lacking} of {wanted.size} elements are in no saved shard, the first at {list(missing[0].offset)}")
    return copies


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common, None where that is nothing."""
    starts = [max(x, y) for x, y in zip(a.offset, b.offset, strict=True)]
    ends = [min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _without(box: Box, hole: Box) -> list[Box]:
    """``box`` less ``hole``, which lies inside of it: at most two slabs for each dimension."""
    slabs = []
    offset, shape = list(box.offset), list(box.shape)
    for d in range(len(shape)):
        before = hole.offset[d] - offset[d]
        after = offset[d] + shape[d] - hole.offset[d] - hole.shape[d]
        for start, length in ((offset[d], before), (hole.offset[d] + hole.shape[d], after)):
            if length:
                slabs.append(Box((*offset[:d], start, *offset[d + 1 :]), (*shape[:d], length, *shape[d + 1 :])))
        offset[d], shape[d] = hole.offset[d], hole.shape[d]
    return slabs


def _within(part: Box, of: Box) -> tuple[slice, ...]:
    return tuple(slice(p - o, p - o + n) for p, o, n in zip(part.offset, of.offset, part.shape, strict=True))


def is_sharded(node: Any) -> bool:
    return isinstance(node, dict) and SHARDED in node


def sharded(shape: Sequence[int], placements: Sequence[str], offset: Sequence[int] | None, piece: Any) -> dict[str, Any]:
    """The node of one rank's piece."""
    return {SHARDED: list(shape), "placements": list(placements), "pieces": [[None if offset is None else list(offset), piece]]}


def joined(path: str, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One node of the pieces of several ranks. Raises StateError where they are not of one array, or no boxes of it."""
    first = nodes[0]
    pieces = []
    for node in nodes:
        if node[SHARDED] != first[SHARDED]:
            raise StateError(f"state at {path}: the ranks saved shards of arrays of shape {first[SHARDED]} and {node[SHARDED]}")
        for offset, piece in node["pieces"]:
            if offset is None:
                raise StateError(
                    f"state at {path}: its placement {' x '.join(node['placements'])} cannot be cut anew; use as many ranks as wrote it"
                )
            pieces.append([offset, piece])
    return {SHARDED: first[SHARDED], "placements": first["placements"], "pieces": pieces}


def boxes(node: dict[str, Any]) -> list[Box]:
    """Where the pieces of a node lie."""
    return [Box(tuple(offset), tuple(piece.shape)) for offset, piece in node["pieces"]]
