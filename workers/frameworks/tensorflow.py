"""TensorFlow with Keras 3: makes the devices and the strategy, and takes state as variables by their stable path.

A part is a Keras model (its optimizer comes along), an optimizer, a tf.Module, or what plain code uses. One process holds all replicas of
a mirrored job, so everything is the rank's own. Metric variables are left out: Keras resets them when an epoch begins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import tensorflow as tf

from workers.agreement import Store
from workers.checkpoint.tree import StateError
from workers.frameworks.plain import derive_generators, derive_random, load_into, random_state, refuse, set_random_state, state_of


class TensorFlow:
    """The adapter of TensorFlow. ``strategy`` is a MirroredStrategy, or None where the script makes its own from TF_CONFIG."""

    device: Any = None
    store: Store | None = None

    def __init__(self, strategy: str | None, devices: int | None) -> None:
        self.strategy: Any = None
        self._optimizers: list[Any] = []
        self._iterations: list[int] = []  # of each when the last step was finished
        if strategy in (None, "mirrored"):
            self.strategy = tf.distribute.MirroredStrategy(_devices(devices))

    def begin(self, parts: dict[str, Any]) -> None:
        for name, part in parts.items():
            refuse(name, part)
        found = (getattr(part, "optimizer", part) for part in parts.values())
        self._optimizers = [optimizer for optimizer in found if hasattr(optimizer, "iterations")]

    def capture(self, parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """({}, state of this rank)."""
        return {}, {"parts": {name: _state(part) for name, part in parts.items()}, "random": random_state()}

    def apply(self, parts: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Assign the saved values; an optimizer that has no variables yet is built first. Raises StateError naming part and variable."""
        loaded = {}
        for name, part in parts.items():
            state = own["parts"][name]
            if hasattr(part, "variables"):
                self._assign(name, part, state)
                loaded[name] = part
            else:
                loaded[name] = load_into(part, state)
        set_random_state(own["random"])
        return loaded

    def step_finished(self) -> None:
        self._iterations = self._counted()

    def moved(self) -> bool:
        """An optimizer has stepped since."""
        return bool(self._iterations) and self._iterations != self._counted()

    def _counted(self) -> list[int]:
        return [int(optimizer.iterations.numpy()) for optimizer in self._optimizers]

    def derive(self, names: Collection[str], parts: dict[str, Any], rank: int) -> None:
        derive_random(names, rank)
        derive_generators(names, parts, rank)

    def adrift(self, parts: dict[str, Any]) -> bool:
        """Replicas are always together."""
        return False

    def close(self) -> None:
        """Nothing is open."""

    def _assign(self, name: str, part: Any, state: dict[str, Any]) -> None:
        optimizer = getattr(part, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            with self.strategy.scope() if self.strategy is not None else tf.name_scope(""):
                optimizer.build(part.trainable_variables)
        variables = _variables(part)
        if variables.keys() != state.keys():
            odd = sorted(variables.keys() ^ state.keys())
            raise StateError(
                f"restore: {name} has {len(variables)} variables, the saved state {len(state)}, they differ in {odd[0]}; "
                "build the model the same way (with an Input or model.build) before restore"
            )
        for path, variable in variables.items():
            value = state[path]
            if tuple(variable.shape) != value.shape:
                raise StateError(f"restore: {name}: {path} has shape {tuple(variable.shape)}, the saved one {value.shape}")
            variable.assign(value)


def _devices(count: int | None) -> list[str]:
    """Names of ``count`` replicas' devices; logical CPU devices are made where there is no GPU."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if count is not None and count > len(gpus):
            raise StateError(f"devices_per_node is {count}, this node shows {len(gpus)} GPUs; lower it or ask for more gpus_per_node")
        return [f"/gpu:{i}" for i in range(count or len(gpus))]
    count = count or 1
    if count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        except RuntimeError as error:
            raise StateError("workers.start must come before the first TensorFlow operation, because it makes the devices") from error
    return [f"/cpu:{i}" for i in range(count)]


def _state(part: Any) -> Any:
    if hasattr(part, "variables"):
        return {path: np.asarray(_one_replica(variable).numpy()) for path, variable in _variables(part).items()}
    return state_of(part)


def _one_replica(variable: Any) -> Any:
    """What is the same on all replicas is read from the first: the strategy's own way takes ten times as long, each step."""
    inner = getattr(variable, "value", variable)  # a Keras variable holds one of TensorFlow
    replicas = getattr(inner, "values", None)
    return replicas[0] if replicas and inner.synchronization != tf.VariableSynchronization.ON_READ else variable


def _variables(part: Any) -> dict[str, Any]:
    """Variables by path; a path that occurs again gets a number, in the order in which they were made."""
    optimizer = getattr(part, "optimizer", None)
    found: dict[str, Any] = {}
    for variable in [*part.variables, *(optimizer.variables if optimizer is not None else [])]:
        path = str(getattr(variable, "path", variable.name))
        count = 1
        while path in found:
            count += 1
            path = f"{path.rsplit('#', 1)[0]}#{count}"
        found[path] = variable
    return found
