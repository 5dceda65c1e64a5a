"""A small training with everything that has state: dropout, batch norm, AdamW, a schedule, shuffled data, all random generators.

Arguments: steps, then faults as ``kill:<rank>:<step>`` (SIGKILL to itself after that step) or ``pause`` (wait for a line on stdin after
each step). Prints ``step=N loss=X`` and at the end ``weights=<hash> random=<hash>``.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import workers

run = workers.start()
torch.manual_seed(3)
random.seed(3 + run.rank)
np.random.seed(3 + run.rank)
inputs, targets = torch.randn(52, 6), torch.randn(52, 2)

net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200_000)
data = workers.data.Batches((inputs, targets), 8, seed=5)
torch.manual_seed(10 + run.rank)
found = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
print(f"restored={found.step} source={found.source}", flush=True)

steps, faults = int(sys.argv[1]), sys.argv[2:]
batches = data.forever()
while run.steps < steps and not run.should_stop:
    x, y = next(batches)
    noise = random.random() + float(np.random.rand())
    optimizer.zero_grad()
    loss = (model(x + noise) - y).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.step(loss=loss)
    print(f"step={run.steps} loss={loss.item():.9f}", flush=True)
    if f"kill:{run.rank}:{run.steps}" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"raise:{run.rank}:{run.steps}" in faults:
        raise RuntimeError("as asked")
    if "pause" in faults:
        sys.stdin.readline()

state = hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values()))
drawn = hashlib.sha256(repr((random.random(), np.random.rand(), torch.rand(1).item(), scheduler.get_last_lr())).encode())
print(f"weights={state.hexdigest()} random={drawn.hexdigest()}", flush=True)
