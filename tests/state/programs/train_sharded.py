"""A training whose state is sharded.

ARGS: steps, and ``fsdp`` (fully_shard, uneven shards), ``zero`` (ZeroRedundancyOptimizer under DDP) or ``plain`` (the same model, whole);
then words: ``elastic``, ``drift`` (a part that differs between the ranks), ``window`` (the optimizer takes every second step),
``unsynced`` (and gradients wait for it). Prints ``restored=N found=<hash>`` and, after each step, ``step=N state=<hash> samples=[...]``; a
hash is that of gathered weights and optimizer state. ``draws`` tells what the rank's random generators give after the restore.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import workers

STEPS, WAY, *WORDS = os.environ["ARGS"].split()
run = workers.start()
torch.manual_seed(3)
model: Any = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7) if WAY == "zero" else nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
if WAY == "fsdp":
    fully_shard(model[0])
    fully_shard(model)
elif WAY == "zero":
    model = DistributedDataParallel(model)
if WAY == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.05)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
data = workers.data.Batches(48, 12, seed=5)
inputs, targets = torch.randn(48, 5), torch.randn(48, 3)
torch.manual_seed(10 + run.rank)
random.seed(10 + run.rank)
np.random.seed(7)
named = {"draw": torch.Generator().manual_seed(run.rank), "same": random.Random(4)}
if "drift" in WORDS:
    named["notes"] = {"seen": [run.rank]}


def full(value: Any) -> bytes:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def gathered() -> str:
    if WAY == "zero":
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict() if run.rank == 0 else {"state": {}, "param_groups": []}
    else:
        state = optimizer.state_dict()
    inner = model.module if WAY == "zero" else model
    digest = hashlib.sha256()
    for key, value in inner.state_dict().items():
        if "running" not in key and "tracked" not in key:
            digest.update(key.encode() + full(value))
    for place, entry in sorted(state["state"].items()):
        for key, value in sorted(entry.items()):
            digest.update(f"{place}{key}".encode() + full(value))
    digest.update(repr([{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]).encode())
    return digest.hexdigest()


found = run.restore(elastic="elastic" in WORDS, model=model, optimizer=optimizer, scheduler=scheduler, data=data, **named)
print(f"restored={found.step} found={gathered()}", flush=True)
drawn = {"python": random.random(), "numpy": float(np.random.rand()), "torch": torch.rand(1).item()}
drawn |= {"draw": torch.rand(1, generator=named["draw"]).item(), "same": named["same"].random()}
print(f"draws= {json.dumps(drawn)}", flush=True)
batches = data.forever()
while run.steps < int(STEPS):
    samples = next(batches)
    if "unsynced" in WORDS:
        model.set_requires_gradient_sync(run.steps % 2 == 1)
    (model(inputs[samples]) - targets[samples]).square().mean().backward()
    if "window" not in WORDS or run.steps % 2:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.step()
    print(f"step={run.steps} state={gathered()} samples={samples.tolist()}", flush=True)
