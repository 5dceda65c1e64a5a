"""The same training twice: as a bare script, and with KeepStep's API. Half of a step computes, half of it sleeps.

The sleep stands for an accelerator that works while its processor has little to do; the rest is real work of one core, with the caches and
the memory that such work uses. BENCH_STEP_MS is what a step should take, about: the network is as deep as that asks for, so the state, the
optimizer's work and the gradients to exchange grow with it.
"""

import os
import time

import torch.distributed as dist
from torch import nn
from training import INPUT, Training

MS_PER_LAYER = 5  # of a step; a layer has 66 thousand parameters, with AdamW's moments 0.8 MB of state in 16 arrays
BATCH = 200  # so that one core is busy for half of the step


def steady(rank: int, folder: str) -> Training:
    step_ms = float(os.environ["BENCH_STEP_MS"])
    return Training(rank, folder, lambda: network(round(step_ms / MS_PER_LAYER)), BATCH, sleep_s=step_ms / 2000)


def network(depth: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(INPUT, INPUT), nn.LayerNorm(INPUT))))


def bare(folder: str) -> None:
    dist.init_process_group("gloo")
    training = steady(dist.get_rank(), folder)
    step = 0
    while True:
        step += 1
        training.train()
        training.finished(step)


def kept(folder: str) -> None:
    import workers

    run = workers.start()
    training = steady(run.rank, folder)
    run.restore(model=training.model, optimizer=training.optimizer)
    with open(f"{folder}/inside-{run.rank}", "w", buffering=1) as inside:
        while not run.should_stop:
            loss = training.train()
            begun = time.perf_counter()
            run.step(loss=loss)
            inside.write(f"{time.perf_counter() - begun:.7f}\n")
            training.finished(run.steps)


if __name__ == "__main__":
    (kept if "KEEPSTEP_SHM" in os.environ else bare)(os.environ["BENCH_FOLDER"])
