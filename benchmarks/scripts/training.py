"""The training that all systems run: a small DDP model, 30 ms of sleep a step, and each rank's own log of finished steps.

A step counts as finished once its state is saved, where this step saves; then the rank appends one line `<Unix time> <step> <pid>` to its
file, by one write, so that a kill leaves no half of it.
"""

import os
import time
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

INPUT = 256


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(INPUT, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))


class Training:
    def __init__(
        self, rank: int, folder: str, network: Callable[[], torch.nn.Module] = small, batch: int = 32, sleep_s: float = 0.03
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._batch, self._sleep_s = batch, sleep_s
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._log = os.open(f"{folder}/rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def train(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(self._batch, INPUT)).square().mean()
        time.sleep(self._sleep_s)  # the work of a larger model: most of it lies before the gradients are exchanged
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def finished(self, step: int) -> None:
        os.write(self._log, f"{time.time():.4f} {step} {os.getpid()}\n".encode())

    def save(self, path: str, step: int) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}, path)

    def load(self, path: str) -> int:
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        step: int = saved["step"]
        return step
