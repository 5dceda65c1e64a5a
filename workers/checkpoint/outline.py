"""The shape of a state tree, remembered: the next tree of the same shape is read at a fraction of the cost of describing it. PURE.

Invariant: with what ``Outline.read`` gives, the known skeleton makes the very tree that was read; it gives None where that would not be
so, or where an array has another type, shape or layout. Nothing of an earlier tree but its shape is kept, so a leaf that was replaced is
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workers.checkpoint.tree import MAPPINGS, are_scalars

_Read = Callable[[Any, list[Any], list[Any]], bool]


class Outline:
    """Of the tree with this ``skeleton`` (scalars kept apart) and these ``arrays``."""

    def __init__(self, skeleton: Any, arrays: Sequence[Any]) -> None:
        self._read = _reader(skeleton)
        self._types = list(map(type, arrays))
        self._forms = _forms(arrays)

    def read(self, tree: Any) -> tuple[list[Any], list[Any]] | None:
        """(arrays, scalars) of ``tree``, None where it differs in more than values."""
        arrays: list[Any] = []
        scalars: list[Any] = []
        fits = (
            self._read(tree, arrays, scalars)
            and list(map(type, arrays)) == self._types
            and are_scalars(scalars)
            and _forms(arrays) == self._forms
        )
        return (arrays, scalars) if fits else None


def _forms(arrays: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    return [(array.dtype, array.shape, getattr(array, "layout", None)) for array in arrays]


def _reader(node: Any) -> _Read:
    """A function that appends what lies under ``node`` and says whether the shape fits; the types of the leaves are checked later."""
    if isinstance(node, list):
        return _sequence(list, node)
    ((tag, body),) = node.items()
    if tag == "a":
        return _array
    if tag == "v":
        return _scalar
    return _sequence(tuple, body) if tag == "t" else _mapping(MAPPINGS[tag], body)


def _array(value: Any, arrays: list[Any], scalars: list[Any]) -> bool:
    arrays.append(value)
    return True


def _scalar(value: Any, arrays: list[Any], scalars: list[Any]) -> bool:
    scalars.append(value)
    return True


def _sequence(kind: Any, nodes: Sequence[Any]) -> _Read:
    count = len(nodes)
    below = _below([_reader(node) for node in nodes])

    def read(value: Any, arrays: list[Any], scalars: list[Any]) -> bool:
        return type(value) is kind and len(value) == count and below(value, arrays, scalars)

    return read


def _mapping(kind: Any, items: Sequence[tuple[Any, Any]]) -> _Read:
    keys = [key for key, _ in items]
    types = list(map(type, keys))
    numbered = int in types  # True equals 1, and is refused as a key
    below = _below([_reader(node) for _, node in items])

    def read(value: Any, arrays: list[Any], scalars: list[Any]) -> bool:
        if type(value) is not kind:
            return False
        found: list[Any] = list(value)
        if found != keys or (numbered and list(map(type, found)) != types):
            return False
        return below(value.values(), arrays, scalars)

    return read


def _below(readers: Sequence[_Read]) -> _Read:
    """Of as many values as there are ``readers``. Containers of nothing but arrays or nothing but scalars hold most leaves of a state."""

    def only_arrays(values: Any, arrays: list[Any], scalars: list[Any]) -> bool:
        arrays.extend(values)
        return True

    def only_scalars(values: Any, arrays: list[Any], scalars: list[Any]) -> bool:
        scalars.extend(values)
        return True

    def mixed(values: Any, arrays: list[Any], scalars: list[Any]) -> bool:
        return all(reader(value, arrays, scalars) for reader, value in zip(readers, values, strict=True))

    if all(reader is _array for reader in readers):
        return only_arrays
    return only_scalars if all(reader is _scalar for reader in readers) else mixed
