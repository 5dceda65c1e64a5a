"""A torch DataLoader under Batches: worker processes and prefetch, and still a position that counts what training was given.

Invariants: the position moves when a batch reaches the training loop, never when a worker fetches it; no draw is made from torch's global
generator, so a restart in the middle of an epoch leaves it untouched; what a worker draws for a sample depends on (seed, epoch, number of
the sample) only, not on the number of workers, of ranks or of restarts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset


class Position(Protocol):
    """What Batches is to the loader."""

    seed: int
    length: int

    def __len__(self) -> int: ...
    def rest(self) -> tuple[int, range]: ...
    def samples(self, epoch: int, number: int) -> Any: ...
    def advance(self) -> None: ...


class Loader:
    """Iterate it for the rest of the present epoch. ``options`` are those of DataLoader."""

    def __init__(self, position: Position, dataset: Any, options: dict[str, Any]) -> None:
        taken = sorted(options.keys() & {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"})
        if taken:
            raise ValueError(f"{taken[0]}: Batches decides it; leave it out")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                "dataset: it needs __getitem__ and __len__; one that can only be iterated belongs into torchdata's StatefulDataLoader"
            )
        if len(dataset) != position.length:
            raise ValueError(f"dataset: {len(dataset)} samples, Batches was made for {position.length}")
        self._position = position
        seeded = _Seeded(dataset, position.seed) if options.get("num_workers") else _Plain(dataset)
        self._loader = DataLoader(seeded, batch_sampler=_Ahead(position), generator=torch.Generator().manual_seed(0), **options)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._position)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._position.advance()
            yield batch

    def forever(self) -> Iterator[Any]:
        """Epoch after epoch, from the present position."""
        while True:
            yield from self


class _Ahead:
    """Sample numbers with their epoch, batch by batch, from the position that it finds when an iteration begins."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def __len__(self) -> int:
        return len(self._position)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, numbers = self._position.rest()
        return ([(epoch, int(sample)) for sample in self._position.samples(epoch, number)] for number in numbers)


class _Plain:
    """In the training process a sample draws from the generators there, which are part of the state."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        numbers = [number for _, number in places]
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(numbers))
        return [self.dataset[number] for number in numbers]


class _Seeded:
    """In a worker process each sample, or each batch of a dataset that takes whole ones, begins with seeds of its own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            self._begin(*places[0])
            return list(self.dataset.__getitems__([number for _, number in places]))
        found = []
        for epoch, number in places:
            self._begin(epoch, number)
            found.append(self.dataset[number])
        return found

    def _begin(self, epoch: int, number: int) -> None:
        low, high = (int(word) for word in np.random.SeedSequence([self.seed, epoch, number]).generate_state(2))
        random.seed(low << 32 | high)
        np.random.seed(low)
        # Not torch.manual_seed: it would queue a call for CUDA each time.
        torch.default_generator.manual_seed(low << 32 | high)
