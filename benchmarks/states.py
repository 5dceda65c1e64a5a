"""Training states of a chosen size: what a model and its AdamW hold after a step. One rank, one process, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workers.board import Board
from workers.environment import read_environment
from workers.frameworks.torch import Torch
from workers.run import Run

EXAMPLE = Path(__file__).parents[1] / "examples" / "shakespeare"
WIDTH = 1024  # of a layer: a matrix of 4 MiB, as in a transformer of some hundred million parameters
LAYER_BYTES = 3 * 4 * WIDTH * (WIDTH + 1)  # parameter and two moments in 32 bits


class State:
    """``model`` and ``optimizer`` as a training leaves them between two steps, without gradients."""

    def __init__(self, megabytes: int | None) -> None:
        """``megabytes`` None: the state of examples/shakespeare, 2 MB in many small arrays."""
        torch.manual_seed(0)
        self.model = _example() if megabytes is None else _layers(megabytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        return [*self.model.state_dict().values(), *moments]


@contextmanager
def snapshots_of(state: State, shm: Path) -> Iterator[Run]:
    """A rank that takes a snapshot of ``state`` in each ``run.step`` and leaves the newest pinned, as for a checkpoint."""
    Board.create(shm / "board-0", generation=0, pid=0)
    environment = read_environment({"KEEPSTEP_SHM": str(shm), "KEEPSTEP_SNAPSHOT_EVERY": "1"})
    run = Run(environment, Torch(environment.place, launched=False))
    run.restore(model=state.model, optimizer=state.optimizer)
    yield run
    run.finish()


def _layers(megabytes: int) -> torch.nn.Module:
    count = max(1, round(megabytes * 1_000_000 / LAYER_BYTES))
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def _example() -> torch.nn.Module:
    sys.path.insert(0, str(EXAMPLE))
    from model import Transformer

    network: torch.nn.Module = Transformer(vocabulary=65, width=64, layers=3, heads=4, context=64)
    return network
