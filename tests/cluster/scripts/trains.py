"""Trains a small model with KeepStep until the file ``enough`` lies in its folder. Every step is noted in a file of its rank, which loses
nothing where what was printed last may go with an agent."""

import os
import time

import torch
import torch.distributed as dist

import workers

run = workers.start()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
run.restore(model=model, optimizer=optimizer)
enough = torch.zeros(1)
notes = open(f"steps-{run.rank}", "a", buffering=1)  # noqa: SIM115 - until the process ends
while not enough:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8) * run.rank).pow(2).mean()
    loss.backward()
    optimizer.step()
    enough.fill_(os.path.exists("enough"))
    dist.all_reduce(enough)  # all ranks end after the same step
    notes.write(f"{run.steps + 1}\n")
    run.step(loss=loss)
    time.sleep(0.01)
