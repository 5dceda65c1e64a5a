"""Trains a small transformer on Shakespeare's plays with DistributedDataParallel.

``python train.py`` runs alone; ``keepstep submit -f job.yaml`` runs it on several nodes and brings it back, bit for bit, after a failure.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from model import Transformer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import workers
from workers.data import Batches

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of all ranks in one step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    run = workers.start()
    torch.manual_seed(args.seed)

    # One token per character; the text is ASCII, so its bytes are its characters. Fast, for a restarted rank reads it again.
    characters = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
    alphabet = np.flatnonzero(np.bincount(characters))
    number = np.zeros(256, dtype=np.int64)
    number[alphabet] = np.arange(len(alphabet))
    tokens = torch.from_numpy(number[characters]).to(run.device)

    network = Transformer(len(alphabet), args.width, args.layers, args.heads, args.context).to(run.device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    warm_up = max(1, args.steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / args.steps))))
    )
    passages = Batches((len(tokens) - 1) // args.context, args.batch_size, seed=args.seed)
    torch.manual_seed(args.seed + 1 + run.rank)  # each rank drops other neurons
    run.restore(model=model, optimizer=optimizer, scheduler=scheduler, data=passages)

    window = torch.arange(args.context, device=run.device)
    batches = passages.forever()
    while run.steps < args.steps and not run.should_stop:
        places = torch.from_numpy(next(batches)).to(run.device)[:, None] * args.context + window
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens[places]).flatten(0, 1), tokens[places + 1].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        # Printed before the step counts as finished: a kill in between prints it twice, never not at all.
        print(f"step={run.steps + 1} loss={loss.item():.6f}", flush=True)
        run.step(loss=loss, lr=scheduler.get_last_lr()[0])

    if run.rank == 0 and run.steps >= args.steps:
        digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in network.parameters()))
        print(f"weights={digest.hexdigest()}", flush=True)
        network.eval()
        begin = torch.tensor([[number[ord("\n")]]], device=run.device)
        written = network.continue_text(begin, args.sample, torch.Generator(run.device).manual_seed(args.seed))
        print(bytes(alphabet[written[0].cpu().numpy()].tolist()).decode("ascii"), flush=True)


if __name__ == "__main__":
    main()
