"""A plain DDP script that knows nothing of KeepStep: linear model, own torch.save every 10 steps, resumes by itself.

``FAULT=<rank>:<step>:<kind>`` makes that rank raise, leave or sleep at that step; several have commas between them.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "40"))
PAUSE = float(os.environ.get("PAUSE", "0.02"))
SNAPSHOT = os.path.join(os.environ["KEEPSTEP_CHECKPOINT_DIR"], "toy.pt")


def fault(rank: int, step: int) -> None:
    for plan in os.environ.get("FAULT", "").split(","):
        if plan == f"{rank}:{step}:raise":
            raise ValueError("the toy broke on purpose")
        if plan == f"{rank}:{step}:leave":
            os._exit(0)
        if plan == f"{rank}:{step}:sleep":
            time.sleep(3600)


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = 0
    if os.path.exists(SNAPSHOT):
        saved = torch.load(SNAPSHOT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start + 1, STEPS + 1):
        fault(rank, step)
        loss = model(torch.ones(4, 8) * rank).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step={step} loss={loss.item():.4f}", flush=True)
        if step % 10 == 0:
            if rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, SNAPSHOT + ".new")
                os.replace(SNAPSHOT + ".new", SNAPSHOT)
            dist.barrier()
        time.sleep(PAUSE)
    dist.destroy_process_group()
    print("finished", sys.argv[1:], flush=True)


if __name__ == "__main__":
    main()
