"""What runs under torchrun, and unchanged under KeepStep: rank 0 keeps the state in a file of its own, after every step."""

import os

import torch.distributed as dist
from training import Training

FOLDER = os.environ["BENCH_FOLDER"]
FILE = f"{FOLDER}/saved.pt"


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(rank, FOLDER)
    step = training.load(FILE) if os.path.exists(FILE) else 0
    while True:
        step += 1
        training.train()
        if rank == 0:
            training.save(FILE + ".new", step)
            os.replace(FILE + ".new", FILE)
        training.finished(step)


if __name__ == "__main__":
    main()
