"""Training state as a JSON skeleton and a flat list of arrays, and back, exactly.

A state is a tree of dict, OrderedDict, Counter (str and int keys, order kept), list, tuple, None, bool, int, float, str, NumPy scalars,
NumPy arrays and dense torch tensors. Invariants: ``unflatten(*flatten(x))`` equals ``x`` in every bit and type; nothing is pickled; equal
trees on two ranks give equal paths in the same order. A tensor comes back detached, on the CPU and contiguous.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64
SCALARS = frozenset({type(None), bool, int, float, str})
MAPPINGS: dict[str, type] = {"d": dict, "o": OrderedDict, "c": Counter}  # by the tag that stands for it in a skeleton
_TAGS = {kind: tag for tag, kind in MAPPINGS.items()}
_SCALARS_AND_LISTS = SCALARS | {list}
_FINITE = json.JSONEncoder(allow_nan=False)

# Names that the safetensors format gives to element types; any other type is stored as bytes (U8) and named in our own table.
SAFETENSORS_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class StateError(Exception):
    """State that cannot be saved, read or applied; the message names what and the remedy."""


class StateGone(StateError):
    """The state that a generation was to start from cannot be read any more. No fault of the script's; another state will do."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array: ``kind`` is numpy, scalar (a NumPy scalar) or torch; ``dtype`` the element type's own name; ``size`` in bytes."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def flatten(tree: Any, root: str = "", scalars: list[Any] | None = None) -> tuple[Any, list[tuple[str, Any]]]:
    """(skeleton of JSON values, arrays with their paths). With ``scalars``, scalars and lists of nothing else are put there, for ``fill``
    to put back, and the skeleton tells only the tree's shape. Raises StateError naming the path and type of a leaf that is neither."""
    leaves: list[tuple[str, Any]] = []
    return _encode(tree, root, leaves, 0, scalars), leaves


def are_scalars(values: Sequence[Any]) -> bool:
    """True where each is a scalar or a list of nothing but scalars."""
    types = set(map(type, values))
    return types <= SCALARS or (types <= _SCALARS_AND_LISTS and all(SCALARS.issuperset(map(type, v)) for v in values if type(v) is list))


def scalars_json(scalars: Sequence[Any]) -> str:
    try:
        return _FINITE.encode(scalars)
    except ValueError:
        try:
            return json.dumps([_encode(value, "", [], 0, None) for value in scalars])
        except ValueError as error:
            raise StateError(f"state: a number cannot be saved: {error}; keep large numbers as text or bytes") from error


def fill(skeleton: Any, scalars: Sequence[Any]) -> Any:
    """The skeleton that ``flatten`` gives without ``scalars``; those as they came back from ``scalars_json``."""
    if isinstance(skeleton, list):
        return [fill(node, scalars) for node in skeleton]
    ((tag, body),) = skeleton.items()
    if tag == "v":
        return scalars[body]
    if tag == "a":
        return skeleton
    return {tag: fill(body, scalars) if tag == "t" else [[key, fill(node, scalars)] for key, node in body]}


def unflatten(skeleton: Any, leaves: Sequence[Any]) -> Any:
    """The tree again; ``leaves`` in the order in which ``flatten`` gave them. Raises StateError on a malformed skeleton."""
    try:
        return _decode(skeleton, leaves)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StateError(f"the skeleton of the saved state is malformed: {type(error).__name__}: {error}") from error


def spec_of(path: str, leaf: Any) -> LeafSpec:
    """Describe an array. Raises StateError where its element type or layout cannot be stored."""
    if is_torch(leaf):
        _check_torch(path, leaf)
        return LeafSpec(path, "torch", str(leaf.dtype)[6:], tuple(leaf.shape), leaf.numel() * leaf.element_size())
    kind = "numpy" if hasattr(leaf, "__setitem__") else "scalar"
    return LeafSpec(path, kind, _numpy_name(path, leaf.dtype), tuple(leaf.shape), leaf.nbytes)


def materialize(spec: LeafSpec, data: memoryview) -> Any:
    """An array of its own from ``data`` (``spec.size`` bytes, any memory)."""
    import numpy as np

    if spec.kind == "torch":
        import torch

        out = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        if spec.size:
            # Through bytes: the data may be read-only and need not be aligned to the element.
            out.reshape(-1).view(torch.uint8).numpy()[...] = np.frombuffer(data, np.uint8)
        return out
    array = np.frombuffer(data, dtype=numpy_type(spec.dtype)).reshape(spec.shape).copy()
    return array[()] if spec.kind == "scalar" else array


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def safetensors_type(spec: LeafSpec) -> str | None:
    """The format's name for the element type, None where it has none."""
    name = spec.dtype
    if spec.kind != "torch":
        name = name.removeprefix("ml_dtypes.") if name.startswith("ml_dtypes.") else _native_name(name)
    return SAFETENSORS_TYPES.get(name)


def _encode(value: Any, path: str, leaves: list[tuple[str, Any]], depth: int, scalars: list[Any] | None) -> Any:
    kind = type(value)
    if scalars is not None and (kind in SCALARS or (kind is list and SCALARS.issuperset(map(type, value)))):
        scalars.append(value)
        return {"v": len(scalars) - 1}
    if kind in SCALARS:
        return value if kind is not float or math.isfinite(value) else {"f": repr(value)}
    if _is_array(value, kind):
        leaves.append((path, value))
        return {"a": len(leaves) - 1}
    if depth > MAX_DEPTH:
        raise StateError(f"state at {path[:80]}...: nested deeper than {MAX_DEPTH} levels, or contains itself; save a flatter state")
    if kind in _TAGS:
        return {_TAGS[kind]: [[key, _encode(item, _join(path, key), leaves, depth + 1, scalars)] for key, item in value.items()]}
    if kind is list:
        return [_encode(item, f"{path}/{i}", leaves, depth + 1, scalars) for i, item in enumerate(value)]
    if kind is tuple:
        return {"t": [_encode(item, f"{path}/{i}", leaves, depth + 1, scalars) for i, item in enumerate(value)]}
    raise StateError(
        f"state at {path or '/'}: a {kind.__module__}.{kind.__qualname__} cannot be saved; "
        "keep arrays, numbers, strings, None, dict, list and tuple there"
    )


def _decode(node: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(node, list):
        return [_decode(item, leaves) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, body),) = node.items()
    if tag == "a":
        return leaves[body]
    if tag == "f":
        return float(body)
    if tag == "t":
        return tuple(_decode(item, leaves) for item in body)
    mapping = MAPPINGS[tag]()
    for key, item in body:
        mapping[key] = _decode(item, leaves)
    return mapping


def _join(path: str, key: Any) -> str:
    if type(key) is str:
        if "/" in key or "~" in key or key[:1] == "#":  # escaped, so that no two places of a tree share a path
            key = key.replace("~", "~0").replace("/", "~1").replace("#", "~2")
        return f"{path}/{key}"
    if type(key) is int:
        return f"{path}/#{key}"
    raise StateError(f"state at {path or '/'}: a key of type {type(key).__qualname__} cannot be saved; use str or int keys")


_array_types: set[type] = set()  # seen before


def _is_array(value: Any, kind: type) -> bool:
    if kind in _array_types:
        return True
    np = sys.modules.get("numpy")
    if is_torch(value) or (np is not None and (kind is np.ndarray or isinstance(value, np.generic))):
        _array_types.add(kind)
        return True
    return False


def _check_torch(path: str, tensor: Any) -> None:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or (tensor.dtype.is_complex and tensor.is_conj()):
        raise StateError(f"state at {path}: a {tensor.layout} tensor cannot be saved; make it dense and resolved first")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise StateError(
            f"state at {path}: a {type(tensor).__module__}.{type(tensor).__qualname__} cannot be saved; only plain dense tensors can, "
            "sharded ones must be gathered first"
        )


def _numpy_name(path: str, dtype: Any) -> str:
    if dtype.type.__module__ == "ml_dtypes":
        return f"ml_dtypes.{dtype.name}"
    if dtype.kind not in "biufc":
        raise StateError(f"state at {path}: an array of {dtype} cannot be saved; use a numeric or bool type")
    name: str = dtype.str
    return name


def numpy_type(name: str) -> Any:
    import numpy as np

    if name.startswith("ml_dtypes."):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name.removeprefix("ml_dtypes.")))
    return np.dtype(name)


def _native_name(name: str) -> str:
    import numpy as np

    dtype = np.dtype(name)
    return str(dtype.name) if dtype.isnative else name
