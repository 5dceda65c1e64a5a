"""One callback for ``model.fit``: restores at the beginning, reports each batch as a finished step, stops when the job asks to."""

from __future__ import annotations

from typing import Any

import keras

from workers.checkpoint.tree import StateError
from workers.data import Batches
from workers.run import Run

# Truthy, so that Keras leaves the loop over batches; told apart from a True that someone else set.
_END_OF_EPOCH = "end of epoch"


class KeepStep(keras.callbacks.Callback):  # type: ignore[misc]
    """``model.fit(data.dataset(), callbacks=[KeepStep(run, data=data)])``.

    ``parts`` are restored with the model, unless the script called ``run.restore`` itself. With Batches of workers.data among the parts the
    fit goes on at the next batch, in the middle of an epoch too; without, at the beginning of the epoch. Other callbacks that look at
    ``run.steps`` belong after this one.
    """

    def __init__(self, run: Run, **parts: Any) -> None:
        super().__init__()
        self._run = run
        self._named = parts
        self._data: Batches | None = None
        self._epoch = 0
        self._evaluation: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        executions = getattr(self.model, "steps_per_execution", 1)
        if executions != 1:
            raise StateError(f"steps_per_execution is {executions}; KeepStep needs 1, because it counts each step")
        fresh = not self._run.restored
        if fresh:
            self._run.restore(model=self.model, **self._named)
        self._data = next((part for part in self._run.parts.values() if isinstance(part, Batches)), None)
        if fresh and self._run.steps:
            # Keras reads this after the callback; its own BackupAndRestore does the same.
            self.model._initial_epoch = self._first_epoch()

    def _first_epoch(self) -> int:
        if self._data is not None:
            return self._data.epoch
        return self._run.steps // (self.params.get("steps") or self._run.steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._data is not None:
            self._epoch = self._data.epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.step(**(logs or {}))
        if self._data is not None and self._data.epoch != self._epoch:
            # Leave before Keras asks for a batch too many: its graph draws the random numbers of that step all the same, and the length of
            # a first epoch that is the rest of one would be taken for the length of all.
            self.model.stop_training = _END_OF_EPOCH
        if self._run.should_stop:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.model.stop_training == _END_OF_EPOCH:
            self.model.stop_training = False

    def on_test_begin(self, logs: Any = None) -> None:
        self._evaluation = self._run.phase("eval")
        self._evaluation.__enter__()

    def on_test_end(self, logs: Any = None) -> None:
        self._evaluation.__exit__(None, None, None)
