"""The same training with KeepStep's API: the state is kept by ``run.step``."""

import os

from training import Training

import workers


def main() -> None:
    run = workers.start()
    training = Training(run.rank, os.environ["BENCH_FOLDER"])
    run.restore(model=training.model, optimizer=training.optimizer)
    while not run.should_stop:
        loss = training.train()
        run.step(loss=loss)
        training.finished(run.steps)


if __name__ == "__main__":
    main()
