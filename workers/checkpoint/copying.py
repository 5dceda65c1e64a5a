"""Copies arrays into mapped memory and hashes them on the way.

Invariant: the checksum is that of the bytes that lie in the memory, read back after they were written. Each piece is hashed while it is
still in the processor's cache, so copy and checksum together cost little more than one plain memory copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from workers.checkpoint.layout import LARGE, Layout
from workers.checkpoint.tree import LeafSpec, numpy_type

CHUNK = 512 * 1024  # bytes copied and then hashed: half of a common second-level cache


@dataclass
class _Run:
    """Small arrays that lie side by side from ``start``: indices, and views of their places."""

    start: int
    end: int
    torch: tuple[list[int], list[Any]] = field(default_factory=lambda: ([], []))
    numpy: tuple[list[int], list[Any]] = field(default_factory=lambda: ([], []))


@dataclass(frozen=True)
class _Large:
    """One array with a view of its place."""

    start: int
    end: int
    index: int
    view: Any


class Copier:
    """Of one safetensors image of ``size`` bytes at ``base`` of ``memory``. ``copy`` takes arrays in the order of ``specs``."""

    def __init__(self, memory: mmap.mmap, base: int, size: int, specs: Sequence[LeafSpec], layout: Layout) -> None:
        self._memory = memory
        self._view = memoryview(memory)[base : base + size]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, base))
        self._begin = len(layout.prefix)
        self._view[: self._begin] = layout.prefix
        self._view[layout.size :] = bytes(size - layout.size)  # no chance bytes: the image is equal wherever the arrays are
        self._work = self._batches(base, specs, layout)

    def _batches(self, base: int, specs: Sequence[LeafSpec], layout: Layout) -> list[_Run | _Large]:
        work: list[_Run | _Large] = []
        for i in sorted((i for i, s in enumerate(specs) if s.size), key=lambda i: layout.offsets[i]):
            spec, start = specs[i], layout.offsets[i]
            end = start + spec.size
            view = (_torch_view if spec.kind == "torch" else _numpy_view)(self._memory, spec, base + start)
            if spec.size >= LARGE:
                work.append(_Large(start, end, i, view))
                continue
            run = work[-1] if work else None
            if not isinstance(run, _Run) or end - run.start > CHUNK:
                run = _Run(start, end)
                work.append(run)
            run.end = end
            indices, views = run.torch if spec.kind == "torch" else run.numpy
            indices.append(i)
            views.append(view)
        return work

    def copy(self, arrays: Sequence[Any]) -> Any:
        """Put them in place; returns the xxh3 object of the whole image, which the caller may go on with."""
        torch = sys.modules.get("torch")
        with torch.no_grad() if torch is not None else contextlib.nullcontext():
            return self._copy(arrays)

    def _copy(self, arrays: Sequence[Any]) -> Any:
        digest = xxhash.xxh3_64(self._view[: self._begin])
        at = self._begin
        for batch in self._work:
            if isinstance(batch, _Large):
                self._copy_large(batch, arrays[batch.index], digest)
            else:
                _copy_run(batch, arrays)
                digest.update(self._view[batch.start : batch.end])
            at = batch.end
        digest.update(self._view[at:])
        return digest

    def _copy_large(self, batch: _Large, array: Any, digest: Any) -> None:
        source = _plain_address(array)
        if source is None:
            _assign(batch.view, array)
        for start in range(batch.start, batch.end, CHUNK):
            end = min(start + CHUNK, batch.end)
            if source is not None:
                ctypes.memmove(self._address + start, source + start - batch.start, end - start)
            digest.update(self._view[start:end])


def _copy_run(run: _Run, arrays: Sequence[Any]) -> None:
    indices, views = run.torch
    if indices:
        sys.modules["torch"]._foreach_copy_(views, [arrays[i] for i in indices])
    for i, view in zip(*run.numpy, strict=True):
        view[...] = arrays[i]


def _assign(view: Any, array: Any) -> None:
    if hasattr(view, "copy_"):
        view.copy_(array)
    else:
        view[...] = array


def _plain_address(array: Any) -> int | None:
    """Where the bytes of ``array`` lie as they shall be stored; None where they lie elsewhere or in another order."""
    if hasattr(array, "data_ptr"):
        plain = array.device.type == "cpu" and array.is_contiguous() and not array.is_conj() and not array.is_neg()
        return int(array.data_ptr()) if plain else None
    return int(array.__array_interface__["data"][0]) if array.flags.c_contiguous else None


def _torch_view(memory: mmap.mmap, spec: LeafSpec, offset: int) -> Any:
    import torch

    dtype = getattr(torch, spec.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=spec.size // dtype.itemsize, offset=offset).view(spec.shape)


def _numpy_view(memory: mmap.mmap, spec: LeafSpec, offset: int) -> Any:
    import numpy as np

    dtype = numpy_type(spec.dtype)
    return np.frombuffer(memory, dtype=dtype, count=spec.size // dtype.itemsize, offset=offset).reshape(spec.shape)
