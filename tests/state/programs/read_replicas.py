"""The state of a model under MirroredStrategy, read as snapshots do, beside what TensorFlow's own way reads."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values

from workers.frameworks.tensorflow import TensorFlow, _variables

framework = TensorFlow("mirrored", 2)
with framework.strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
model.fit(tf.random.normal((32, 4)), tf.random.normal((32, 1)), batch_size=8, verbose=0)

expected = {path: variable.numpy() for path, variable in _variables(model).items()}
asked: list[str] = []
slow = values.DistributedVariable.numpy
values.DistributedVariable.numpy = lambda self: asked.append(self.name) or slow(self)
state = framework.capture({"model": model})[1]["parts"]["model"]
equal = state.keys() == expected.keys() and all(np.array_equal(state[path], expected[path]) for path in expected)
print(f"equal={equal}\nasked={asked}\nvariables={len(expected)}")
