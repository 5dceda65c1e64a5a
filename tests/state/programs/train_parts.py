"""A training with all that a real script holds: a scaler, an EMA, accumulation windows, named generators, loaders with workers.

ARGS: steps; how run.step is called (``window``: once per window of three micro-batches, ``micro``: once per micro-batch, ``adrift``: so
too, and ranks wait for each other at the end of a window only); the loader (``batches``: under Batches, ``stateful``: torchdata's,
``workers``: under Batches in two processes); then ``kill:<rank>:<step>``, when all ranks have reached that step. Prints
``step=N loss=X samples=[...]`` and at the end ``weights=<hash> random=<hash>``.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, Subset

import workers

STEPS, CALLS, LOADER, *FAULTS = os.environ["ARGS"].split()
WINDOW = 3


class Noisy(Dataset[Any]):
    """Each sample draws from all global generators, as augmentation does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        noise = 0.0 if LOADER == "stateful" else random.random() + float(np.random.rand()) + torch.rand(1).item()
        return number, torch.full((6,), number / self.count + 0.1 * noise), torch.tensor([1.0, number % 3])


run = workers.start()
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
model = DistributedDataParallel(net)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
dataset = Noisy(47)
named = {"t": torch.Generator().manual_seed(run.rank), "n": np.random.default_rng(run.rank), "p": random.Random(run.rank)}
if LOADER == "stateful":
    from torchdata.stateful_dataloader import StatefulDataLoader

    mine = Subset(dataset, range(run.rank, len(dataset), run.world_size))
    data = loader = StatefulDataLoader(mine, batch_size=4, shuffle=True, num_workers=2, drop_last=True)
else:
    data = workers.data.Batches(len(dataset), 8, seed=5)
    loader = data.loader(dataset, num_workers=2 if LOADER == "workers" else 0)
torch.manual_seed(10 + run.rank)
random.seed(10 + run.rank)
np.random.seed(10 + run.rank)
found = run.restore(model=model, ema=ema, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data, **named)
print(f"restored={found.step} source={found.source}", flush=True)


def forever() -> Iterator[Any]:
    while True:
        yield from loader


batches, taken = forever(), []
while run.steps < int(STEPS):
    for micro in range(WINDOW) if CALLS == "window" else [run.steps % WINDOW]:
        samples, x, y = next(batches)
        taken += samples.tolist()
        noise = torch.rand(1, generator=named["t"]).item() + named["n"].random() + named["p"].random()
        last = micro == WINDOW - 1
        with nullcontext() if last or CALLS == "micro" else model.no_sync():
            loss = (model(x + 0.1 * noise) - y).square().mean() / WINDOW
            scaler.scale(loss).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            ema.update_parameters(net)
            optimizer.zero_grad()
    run.step(loss=loss)
    print(f"step={run.steps} loss={loss.item():.9f} scale={scaler.get_scale()} samples={taken}", flush=True)
    taken = []
    if any(fault.endswith(f":{run.steps}") for fault in FAULTS):
        dist.barrier()
        if f"kill:{run.rank}:{run.steps}" in FAULTS:
            os.kill(os.getpid(), signal.SIGKILL)

tensors = [*net.state_dict().values(), *ema.state_dict().values()]
state = hashlib.sha256(b"".join(value.numpy().tobytes() for value in tensors))
drawn = hashlib.sha256(repr((random.random(), np.random.rand(), torch.rand(1).item(), scheduler.get_last_lr())).encode())
print(f"weights={state.hexdigest()} random={drawn.hexdigest()}", flush=True)
