"""Trains a small network on scikit-learn's digits with Keras ``fit`` under MirroredStrategy.

``python train.py`` runs alone; ``keepstep submit -f job.yaml`` gives it two replicas and brings it back in the middle of an epoch.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import workers
from workers.data import Batches
from workers.keras import KeepStep


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of all replicas in one step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def network(width: int, seed: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dropout(0.1, seed=seed),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = arguments()
    run = workers.start(framework="tensorflow")
    keras.utils.set_random_seed(args.seed)
    tf.config.experimental.enable_op_determinism()

    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16, digits.target.astype("int32")
    data = Batches((images, labels), args.batch_size, seed=args.seed)

    with run.strategy.scope():
        model = network(args.width, args.seed)
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: print(f"step={run.steps} loss={logs['loss']:.6f}", flush=True)
    )
    run.restore(model=model, data=data)
    model.fit(data.dataset(), epochs=args.epochs, initial_epoch=data.epoch, callbacks=[KeepStep(run), tell], verbose=0)

    if run.rank == 0 and data.epoch >= args.epochs:
        digest = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in model.trainable_variables))
        print(f"weights={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
