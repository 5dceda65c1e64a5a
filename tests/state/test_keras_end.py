"""The end of a script of TensorFlow keeps a finished step or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.board import Board
from workers.checkpoint.slots import holdings
from workers.environment import read_environment
from workers.run import Run


@pytest.mark.parametrize(("half", "kept"), [(False, 3), (True, 2)])
def test_a_step_that_never_ended_is_not_kept(shm: Path, half: bool, kept: int) -> None:
    import keras
    import numpy as np

    from workers.frameworks.tensorflow import TensorFlow

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    Board.create(shm / "board-0", 0, 0)
    run = Run(read_environment({"KEEPSTEP_SHM": str(shm), "KEEPSTEP_SNAPSHOT_EVERY": "2"}), TensorFlow("none", None))
    run.restore(model=model)
    for _ in range(3):
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
        run.step()
    if half:
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
    run.finish()
    assert max(h.step for h in holdings(shm, [0], verify=True)) == kept
