"""A state becomes a skeleton and arrays and comes back the same in every bit and type."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.checkpoint.layout import lay_out, locate, partition
from workers.checkpoint.tree import StateError, flatten, materialize, spec_of, unflatten


def round_trip(tree: Any) -> Any:
    """Through real bytes: JSON text for the skeleton, a safetensors image for the arrays."""
    skeleton, leaves = flatten(tree, "own")
    specs = [spec_of(path, leaf) for path, leaf in leaves]
    layout = lay_out(specs)
    image = bytearray(layout.size)
    image[: len(layout.prefix)] = layout.prefix
    for spec, at, (_, leaf) in zip(specs, layout.offsets, leaves, strict=True):
        data = leaf.contiguous().reshape(-1).view(torch.uint8).numpy() if spec.kind == "torch" else np.asarray(leaf)
        image[at : at + spec.size] = data.tobytes()
    found = locate(memoryview(bytes(image)))
    return unflatten(json.loads(json.dumps(skeleton)), [materialize(spec, found[spec.path]) for spec in specs])


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same_bytes(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.numel() == 0 or torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


NUMPY_TYPES = ["<f4", "<f8", "<f2", "<i8", "<i4", "|i1", "|u1", "<u2", "<u8", "|b1", "<c8", "<c16", ">f8", ">i4"]
TORCH_TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex128]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY_TYPES))), draw(shapes)
    size = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype).reshape(shape).copy()


tensors = st.builds(lambda dtype, shape: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype), st.sampled_from(TORCH_TYPES), shapes)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.builds(np.float32, st.floats(width=32))
keys = st.text(max_size=4) | st.integers()
trees = st.recursive(
    scalars | arrays() | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_round_trip(tree: Any) -> None:
    assert same(round_trip(tree), tree)


def test_places_that_look_alike_keep_apart() -> None:
    tree = {"a/b": np.int64(1), "a": {"b": np.int64(2), 1: np.int64(3), "1": np.int64(4), "#1": np.int64(5)}, "a~1b": np.int64(6)}
    assert same(round_trip(tree), tree)
    paths = [path for path, _ in flatten(tree)[1]]
    assert len(set(paths)) == len(paths)


def test_scheduler_milestones_stay_a_counter() -> None:
    tree = {"milestones": Counter({30: 1, 80: 2})}
    assert same(round_trip(tree), tree)


def test_non_contiguous_and_views() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {"t": base.t(), "row": base[1], "step": np.arange(10)[::2]}
    back = round_trip(tree)
    assert torch.equal(back["t"], base.t())
    assert torch.equal(back["row"], base[1])
    assert back["step"].tolist() == [0, 2, 4, 6, 8]


@dataclass
class Odd:
    x: int = 1


@pytest.mark.parametrize(
    ("tree", "place", "kind"),
    [
        ({"optimizer": {"hook": lambda: 1}}, "/optimizer/hook", "function"),
        ({"a": [1, {2: Odd()}]}, "/a/1/#2", "Odd"),
        ({"a": {1, 2}}, "/a", "set"),
        ({"a": b"bytes"}, "/a", "bytes"),
        ({"a": np.array(["x"])}, "/a", "<U1"),
        ({"a": np.array([object()])}, "/a", "object"),
        ({"a": torch.eye(2).to_sparse()}, "/a", "sparse"),
        ({"a": {(1, 2): 3}}, "/a", "tuple"),
        ({"a": {True: 3}}, "/a", "bool"),
    ],
)
def test_what_cannot_be_saved_is_named(tree: Any, place: str, kind: str) -> None:
    with pytest.raises(StateError) as refused:
        round_trip(tree)
    assert place in str(refused.value)
    assert kind in str(refused.value)


def test_state_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(StateError, match="contains itself"):
        flatten(tree)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_partition_is_total_and_balanced(sizes: dict[str, int], parts: int) -> None:
    owner = partition(sizes, parts)
    assert owner.keys() == sizes.keys()
    assert owner == partition(dict(reversed(sizes.items())), parts)
    loads = [sum(max(1, sizes[p]) for p in sizes if owner[p] == part) for part in range(parts)]
    assert max(loads) - min(loads) <= max([*sizes.values(), 1])
