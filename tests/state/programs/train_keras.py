"""Keras fit over two logical devices with dropout and shuffled data. Arguments: epochs, then ``kill:<step>`` or ``callback`` (the callback
restores, not the script). Prints ``step=N sum=X`` for each batch and at the end ``weights=<hash>``."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import workers

run = workers.start()
keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
draw = np.random.default_rng(0)
inputs, labels = draw.normal(size=(52, 5)).astype("float32"), draw.integers(0, 3, 52)
data = workers.data.Batches((inputs, labels), 8, seed=2)
assert len(data) == 7

with run.strategy.scope():
    hidden = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=4)]
    model = keras.Sequential([keras.Input((5,)), *hidden, keras.layers.Dense(3)])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    model.compile(optimizer=keras.optimizers.Adam(schedule), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

epochs, faults = int(sys.argv[1]), sys.argv[2:]


class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        total = sum(float(np.sum(v.numpy())) for v in model.trainable_variables)
        print(f"step={run.steps} sum={total:.9f}", flush=True)
        if f"kill:{run.steps}" in faults:
            os.kill(os.getpid(), signal.SIGKILL)


if "callback" in faults:
    model.fit(data.dataset(), epochs=epochs, callbacks=[workers.keras.KeepStep(run, data=data), Tell()], verbose=0)
else:
    found = run.restore(model=model, data=data)
    print(f"restored={found.step} source={found.source}", flush=True)
    model.fit(data.dataset(), epochs=epochs, initial_epoch=data.epoch, callbacks=[workers.keras.KeepStep(run), Tell()], verbose=0)

digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables]))
print(f"weights={digest.hexdigest()}", flush=True)
