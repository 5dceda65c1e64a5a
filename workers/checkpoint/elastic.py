"""State that one number of ranks saved becomes the state of a rank among another number. PURE.

What is equal on all ranks that saved it is taken as it is, shards are put together, scattered values are collected, and a rank beyond those
that were saved gets random generators to derive its own from. Everything else is refused by its path: nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from workers.checkpoint.format import Tree
from workers.checkpoint.shards import SCATTERED, is_sharded, joined
from workers.checkpoint.tree import StateError, is_torch, unflatten

CONSENT = "elastic"  # key of a rank's own state: the script said that another number of ranks may take it


@dataclass(frozen=True)
class Adapted:
    """``own``: for one rank; ``derive``: names of generators there, of ``random`` and of parts, that must not go on as they are."""

    own: dict[str, Any]
    derive: tuple[str, ...]


def consents(trees: Collection[Tree]) -> bool:
    """The script of every rank agreed."""
    owns = [unflatten(tree.skeleton, [None] * len(tree.leaves)) for tree in trees]
    return all(isinstance(own, dict) and own.get(CONSENT) is True for own in owns)


def adapt(owns: Sequence[dict[str, Any]], rank: int, generators: Collection[str]) -> Adapted:
    """The own state of ``rank`` out of those of all ranks that saved, in their order. ``generators``: parts that are random generators.
    Raises StateError naming what cannot be mapped."""
    if any("window" in own for own in owns):
        raise StateError(
            f"it was saved in the middle of an accumulation window, whose gradients belong to {len(owns)} ranks; "
            "use one from the end of a window, or as many ranks"
        )
    known = {"parts", "random", "buckets", "lead", CONSENT}
    odd = sorted({key for own in owns for key in own} - known)
    if odd:
        raise StateError(f"state at {odd[0]} cannot be given to another number of ranks")
    near, derive = owns[rank % len(owns)], []
    parts: dict[str, Any] = {}
    for name in owns[0]["parts"]:
        states = [own["parts"].get(name) for own in owns]
        if name in owns[0].get("lead", ()):  # at the next forward pass all ranks take those of rank 0
            parts[name] = _merged(name, states[:1])
        elif name in generators and not all(_same(states[0], state) for state in states[1:]):
            parts[name] = _copied(near["parts"][name])
            derive += [name] if rank >= len(owns) else []
        else:
            parts[name] = _merged(name, states)
    streams: dict[str, Any] = {}
    for name in owns[0]["random"]:
        states = [own["random"].get(name) for own in owns]
        streams[name] = _copied(near["random"].get(name))
        alike = len(owns) > 1 and all(_same(states[0], state) for state in states[1:])
        derive += [name] if rank >= len(owns) and not alike else []
    return Adapted({"parts": parts, "random": streams}, tuple(derive))


def _merged(path: str, nodes: Sequence[Any]) -> Any:
    first = nodes[0]
    if all(is_sharded(node) for node in nodes):
        return joined(path, nodes)
    if all(isinstance(node, dict) and node.keys() == {SCATTERED} for node in nodes):
        keys = sorted({key for node in nodes for key in node[SCATTERED]})
        held = {key: [node[SCATTERED][key] for node in nodes if key in node[SCATTERED]] for key in keys}
        return {SCATTERED: {key: _merged(f"{path}/{key}", values) for key, values in held.items()}}
    if any(type(node) is not type(first) for node in nodes):
        raise _differs(path)
    if isinstance(first, dict):
        if any(list(node) != list(first) for node in nodes):
            raise _differs(path)
        merged = type(first)()
        for key in first:
            merged[key] = _merged(f"{path}/{key}", [node[key] for node in nodes])
        return merged
    if isinstance(first, list | tuple):
        if any(len(node) != len(first) for node in nodes):
            raise _differs(path)
        return type(first)(_merged(f"{path}/{i}", items) for i, items in enumerate(zip(*nodes, strict=True)))
    if not all(_same(first, node) for node in nodes[1:]):
        raise _differs(path)
    return _copied(first)


def _differs(path: str) -> StateError:
    return StateError(
        f"state at {path} differs between the ranks that saved it and cannot be given to another number of them; "
        "use as many ranks, or make it equal on all ranks"
    )


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "dtype"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b))
    return bool(a == b) or (a != a and b != b)


def _bytes(array: Any) -> Any:
    if is_torch(array):
        import torch

        array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()


def _copied(node: Any) -> Any:
    """Arrays of its own: what is read may lie in a file that goes away."""
    if isinstance(node, dict):
        fresh = type(node)()
        for key, value in node.items():
            fresh[key] = _copied(value)
        return fresh
    if isinstance(node, list | tuple):
        return type(node)(_copied(value) for value in node)
    if is_torch(node):
        return node.clone()
    return node.copy() if hasattr(node, "dtype") else node
