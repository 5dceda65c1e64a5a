"""Any layout of shards can be cut into any other, every element once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.checkpoint.shards import Box, boxes, joined, recut, sharded, whole
from workers.checkpoint.tree import StateError


def chunks(length: int, parts: int) -> list[tuple[int, int]]:
    """As torch splits a dimension: (offset, length), the last ones shorter or empty."""
    each = -(-length // parts)
    return [(min(i * each, length), max(0, min(each, length - i * each))) for i in range(parts)]


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    found = [Box((), ())]
    for length, count in zip(shape, parts, strict=True):
        found = [Box((*b.offset, at), (*b.shape, n)) for b in found for at, n in chunks(length, count)]
    return found


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    parts = [tuple(draw(st.integers(1, 4)) for _ in shape) for _ in range(2)]
    saved = draw(st.permutations(grid(shape, parts[0]) * draw(st.integers(1, 2))))  # replicas, in any order
    return shape, saved, grid(shape, parts[1])


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_every_layout_is_cut_into_every_other(layout: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    shape, saved, wanted = layout
    array = np.arange(int(np.prod(shape))).reshape(shape)
    pieces = [cut(array, box) for box in saved]
    for box in wanted:
        found, times = np.full(box.shape, -1), np.zeros(box.shape, int)
        for copy in recut(box, saved):
            found[copy.target] = pieces[copy.piece][copy.source]
            times[copy.target] += 1
        assert np.array_equal(found, cut(array, box))
        assert (times == 1).all()


def test_missing_elements_are_counted_and_placed() -> None:
    with pytest.raises(StateError, match=r"6 of 12 elements are in no saved shard, the first at \[2, 0\]"):
        recut(whole((4, 3)), [Box((0, 0), (2, 3)), Box((4, 0), (0, 3))])


def test_pieces_of_the_ranks_make_one_node() -> None:
    nodes = [sharded((4, 2), ["S(0)"], (2 * rank, 0), np.full((2, 2), rank)) for rank in range(2)]
    node = joined("model/w", nodes)
    assert boxes(node) == [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (sharded((4, 3), ["S(0)"], (2, 0), np.zeros((2, 3))), r"model/w: the ranks saved shards of arrays of shape \[4, 2\] and \[4, 3\]"),
        (sharded((4, 2), ["_S(0, 2)"], None, np.zeros((2, 2))), r"model/w: its placement _S\(0, 2\) cannot be cut anew; use as many"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(other: dict[str, object], words: str) -> None:
    with pytest.raises(StateError, match=words):
        joined("model/w", [sharded((4, 2), ["S(0)"], (0, 0), np.zeros((2, 2))), other])
