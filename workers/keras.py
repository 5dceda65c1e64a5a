"""One callback for ``model.fit``: restores at the beginning, reports each batch as a finished step, stops when the job asks to."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from workers.checkpoint.tree import StateError
from workers.run import Run


class KeepStep(keras.callbacks.Callback):  # type: ignore[misc]
    """``model.fit(data.dataset(), callbacks=[KeepStep(run, data=data)])``.

    ``parts`` are restored with the model, unless the script called ``run.restore`` itself. With a ``data`` part from workers.data the fit
    goes on at the next batch, in the middle of an epoch too; without one it goes on at the beginning of the epoch. Other callbacks that
    look at ``run.steps`` belong after this one.
    """

    def __init__(self, run: Run, **parts: Any) -> None:
        super().__init__()
        self._run = run
        self._parts = parts
        self._evaluation: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        executions = getattr(self.model, "steps_per_execution", 1)
        if executions != 1:
            raise StateError(f"steps_per_execution is {executions}; KeepStep needs 1, because it counts each step")
        # The first epoch after a restart is the rest of one; Keras would warn that the input ran out.
        warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
        if self._run.restored:
            return
        self._run.restore(model=self.model, **self._parts)
        data = self._parts.get("data")
        steps = self.params.get("steps")
        # Keras reads this after the callback; its own BackupAndRestore does the same.
        if data is not None and hasattr(data, "epoch"):
            self.model._initial_epoch = data.epoch
        elif steps:
            self.model._initial_epoch = self._run.steps // steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.step(**(logs or {}))
        if self._run.should_stop:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._evaluation = self._run.phase("eval")
        self._evaluation.__enter__()

    def on_test_end(self, logs: Any = None) -> None:
        self._evaluation.__exit__(None, None, None)
