"""Where arrays lie in a safetensors file, and who stores which of them. PURE.

Invariants: a layout depends on nothing but the list of arrays; ``partition`` gives every array to exactly one part, the same on every rank.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.checkpoint.tree import LeafSpec, StateError, safetensors_type

ALIGN = 64
LARGE = 64 * 1024  # bytes of an array that is worth a memory copy of its own
MAX_PREFIX = 100_000_000


@dataclass(frozen=True)
class Layout:
    """``prefix``: length word and JSON header; ``offsets``: of each array from the file's start; ``size``: of the file; all in bytes."""

    prefix: bytes
    offsets: tuple[int, ...]
    size: int


def lay_out(specs: Sequence[LeafSpec]) -> Layout:
    """A safetensors file of ``specs``. Wide elements come first, so that every array is aligned to its element; of equal width the small
    arrays, side by side."""
    order = sorted(range(len(specs)), key=lambda i: (-_alignment(specs[i]), specs[i].size >= LARGE, i))
    entries: dict[str, Any] = {}
    starts = [0] * len(specs)
    at = 0
    for i in order:
        spec = specs[i]
        known = safetensors_type(spec)
        shape = list(spec.shape) if known else [spec.size]
        entries[spec.path] = {"dtype": known or "U8", "shape": shape, "data_offsets": [at, at + spec.size]}
        starts[i] = at
        at += spec.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    prefix = len(text).to_bytes(8, "little") + text
    return Layout(prefix, tuple(len(prefix) + start for start in starts), len(prefix) + at)


def locate(data: memoryview) -> dict[str, memoryview]:
    """The arrays of safetensors bytes by path. Raises StateError where the bytes are not such a file."""
    try:
        length = int.from_bytes(data[:8], "little")
        if length > MAX_PREFIX:
            raise ValueError(f"header of {length} bytes")
        entries = json.loads(bytes(data[8 : 8 + length]))
        found = {}
        for path, entry in entries.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= len(data) - 8 - length:
                raise ValueError(f"{path} lies outside of the file")
            found[path] = data[8 + length + start : 8 + length + end]
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"not a safetensors file: {error}") from error


def partition(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Path -> part, balanced by bytes: largest first, each to the least loaded part."""
    loads = [(0, part) for part in range(parts)]
    owner = {}
    for path in sorted(sizes, key=lambda p: (-sizes[p], p)):
        load, part = heapq.heappop(loads)
        owner[path] = part
        heapq.heappush(loads, (load + max(1, sizes[path]), part))
    return owner


def spec_json(specs: Iterable[LeafSpec]) -> list[list[Any]]:
    return [[s.path, s.kind, s.dtype, list(s.shape), s.size] for s in specs]


def specs_from_json(rows: Sequence[Sequence[Any]]) -> list[LeafSpec]:
    return [LeafSpec(path, kind, dtype, tuple(shape), size) for path, kind, dtype, shape, size in rows]


def _alignment(spec: LeafSpec) -> int:
    width = spec.size // max(1, math.prod(spec.shape)) or 1
    return width & -width
