"""Training data in a shuffled order that can be resumed, for NumPy, torch and tf.data.

The order depends on (seed, epoch, place in the epoch) and on nothing else: ``batch_size`` counts the samples of all ranks in one step, and
each rank takes its part of every batch. So any number of ranks trains on the same samples in the same steps, and a restart goes on with
the very next batch. Invariant: within an epoch every sample is used once; only a last batch smaller than the number of ranks is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.checkpoint.tree import StateError, is_torch
from workers.environment import read_environment

if TYPE_CHECKING:
    from workers.frameworks.loading import Loader


class Batches:
    """``data``: a number of samples (batches are then int64 arrays of sample numbers), an array or tensor, or a tuple of them with equal
    first dimension. ``for batch in batches`` gives the rest of the present epoch. ``rank`` and ``world_size`` default to the launcher's.

    The position counts the batches handed out; a batch that a prefetching reader took early must not count, so after ``dataset`` it counts
    the steps finished by ``run.step`` instead. Raises ValueError naming the argument.
    """

    def __init__(
        self, data: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True, rank: int | None = None, world_size: int | None = None
    ) -> None:
        place = read_environment().place
        self.rank = place.rank if rank is None else rank
        self.world_size = place.world_size if world_size is None else world_size
        self.length = _length(data)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self._data = data
        self._epoch, self._batch = 0, 0
        self._finished = (0, 0)  # the position at the end of the last step
        self._by_steps = False
        self._order: tuple[int, Any] | None = None
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank: {self.rank}, the limit is world_size - 1 = {self.world_size - 1}")
        if not self.world_size <= batch_size <= self.length:
            raise ValueError(
                f"batch_size: {batch_size}, it counts the samples of all ranks: from {self.world_size} (ranks) to {self.length} (samples)"
            )

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Batches per epoch."""
        return self.length // self.batch_size + (self.length % self.batch_size >= self.world_size)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the present epoch, this rank's part of each batch."""
        epoch, numbers = self.rest()
        for number in numbers:
            batch = _pick(self._data, self.samples(epoch, number))
            if not self._by_steps:
                self.advance()
            yield batch

    def forever(self) -> Iterator[Any]:
        """Epoch after epoch, from the present position."""
        while True:
            yield from self

    def loader(self, dataset: Any, **options: Any) -> Loader:
        """A torch DataLoader over ``dataset``, which has as many samples as ``data``; ``options`` as for DataLoader, ``num_workers=2`` and
        ``collate_fn`` for instance. Iterate it instead of this object: ``for batch in data.loader(dataset, num_workers=2)``; what workers
        fetched ahead does not count. Raises ValueError naming the argument."""
        from workers.frameworks.loading import Loader

        return Loader(self, dataset, options)

    def dataset(self) -> Any:
        """A tf.data.Dataset of one epoch; each iteration begins at the position that it finds then: the rest of an epoch after a restart,
        whole ones later. For ``fit(data.dataset(), epochs=E, initial_epoch=data.epoch)``."""
        import tensorflow as tf

        self._by_steps = True
        sample = _pick(self._data, self.samples(0, 0))

        def signature(array: Any) -> Any:
            return tf.TensorSpec((None, *array.shape[1:]), array.dtype)

        specs = tuple(signature(array) for array in sample) if isinstance(sample, tuple) else signature(sample)
        return tf.data.Dataset.from_generator(lambda: iter(self), output_signature=specs)

    def step_finished(self) -> None:
        """Called by ``run.step``."""
        if self._by_steps:
            self.advance()
        self._finished = (self._epoch, self._batch)

    def moved(self) -> bool:
        """A batch was handed out since ``step_finished``."""
        return (self._epoch, self._batch) != self._finished

    def state_dict(self) -> dict[str, Any]:
        """The position, in samples of all ranks, and what it is a position in."""
        return {
            "epoch": self._epoch,
            "sample": self._batch * self.batch_size,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateError where the saved position belongs to other data."""
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise StateError(f"data: {name} is {getattr(self, name)}, the saved position has {state[name]}; use the same data and seed")
        if state["sample"] % self.batch_size:
            raise StateError(
                f"data: the saved position {state['sample']} is inside of a batch of {self.batch_size}; use the same batch_size"
            )
        self._epoch, self._batch = self._finished = state["epoch"], state["sample"] // self.batch_size

    def rest(self) -> tuple[int, range]:
        """(epoch, the numbers of the batches that are left of it)"""
        return self._epoch, range(self._batch, len(self))

    def advance(self) -> None:
        """One more batch has reached the training loop."""
        self._batch += 1
        if self._batch == len(self):
            self._epoch, self._batch = self._epoch + 1, 0

    def samples(self, epoch: int, number: int) -> Any:
        """The sample numbers of this rank's part of a batch."""
        start = number * self.batch_size
        whole = min(self.batch_size, self.length - start)
        first, last = (start + whole * r // self.world_size for r in (self.rank, self.rank + 1))
        return self._permutation(epoch)[first:last]

    def _permutation(self, epoch: int) -> Any:
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.length) if self.shuffle else np.arange(self.length)
            self._order = (epoch, order)
        return self._order[1]


def _length(data: Any) -> int:
    if isinstance(data, int):
        return data
    if not isinstance(data, tuple):
        return len(data)
    lengths = {len(array) for array in data}
    if len(lengths) != 1:
        raise ValueError(f"data: the arrays have {sorted(lengths)} samples; all must have the same number")
    return lengths.pop()


def _pick(data: Any, samples: Any) -> Any:
    if isinstance(data, int):
        return samples
    if isinstance(data, tuple):
        return tuple(_pick(array, samples) for array in data)
    if is_torch(data):
        import torch

        return data[torch.from_numpy(samples)]
    return data[samples]
