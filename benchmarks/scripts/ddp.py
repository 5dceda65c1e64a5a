"""A small DDP training that says when each step ended. ``plain``: keeps its own file after every step; ``api``: uses ``workers``."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FILE = os.environ["SAVED"]
API = sys.argv[1] == "api"


def main() -> None:
    torch.set_num_threads(1)
    run = None
    if API:
        import workers

        run = workers.start()
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    start = 0
    if run is not None:
        start = run.restore(model=model, optimizer=optimizer).step
    elif os.path.exists(FILE):
        saved = torch.load(FILE)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start + 1, 1_000_000):
        loss = model(torch.randn(32, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.03)
        if run is not None:
            run.step(loss=loss)
        print(f"{time.time():.4f} {step} {os.getpid()}", flush=True)
        if run is None and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, FILE + ".new")
            os.replace(FILE + ".new", FILE)


if __name__ == "__main__":
    main()
