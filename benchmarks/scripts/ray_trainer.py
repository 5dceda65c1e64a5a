"""The same training under Ray Train: `ray_trainer.py <address> <folder> <ranks> <steps between checkpoints>`."""

import os
import sys
import tempfile
from typing import Any

import ray
from ray import train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config: dict[str, Any]) -> None:
    from training import Training

    rank = train.get_context().get_world_rank()
    training = Training(rank, config["folder"])
    step = 0
    if (newest := train.get_checkpoint()) is not None:
        with newest.as_directory() as folder:
            step = training.load(os.path.join(folder, "saved.pt"))
    while True:
        step += 1
        training.train()
        if step % config["every"] == 0:
            report(training, rank, step)
        training.finished(step)


def report(training: Any, rank: int, step: int) -> None:
    """Every rank must call it; rank 0 hands the state over."""
    if rank != 0:
        train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        training.save(os.path.join(folder, "saved.pt"), step)
        train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    address, folder, ranks, every = sys.argv[1:]
    ray.init(address, logging_level="ERROR", log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    TorchTrainer(
        loop,
        train_loop_config={"folder": folder, "every": int(every)},
        scaling_config=ScalingConfig(num_workers=int(ranks)),
        run_config=RunConfig(
            name="bench",
            storage_path=f"{folder}/storage",
            failure_config=FailureConfig(max_failures=100),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
