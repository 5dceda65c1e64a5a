"""DDP over layers that are used in another order than they were made, so that its buckets change after the first pass.

ARGS: steps. Prints ``step=N weights=<hash>``.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import workers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle, self.first, self.last = nn.Linear(301, 33), nn.Linear(5, 301), nn.Linear(33, 900)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.middle(self.first(x)).relu())


run = workers.start()
torch.manual_seed(1)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.restore(model=model, optimizer=optimizer)
while run.steps < int(os.environ["ARGS"]):
    draw = torch.Generator().manual_seed(run.steps * run.world_size + run.rank)
    optimizer.zero_grad()
    model(torch.randn(8, 5, generator=draw)).square().mean().backward()
    optimizer.step()
    run.step()
    weights = hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))
    print(f"step={run.steps} weights={weights.hexdigest()}", flush=True)
