"""What a framework is to a run, and which one a script uses."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, Protocol

from workers.agreement import Store
from workers.environment import Environment


class Framework(Protocol):
    """One adapter of workers.frameworks."""

    device: Any
    strategy: Any
    store: Store | None

    def begin(self, parts: dict[str, Any]) -> None: ...
    def capture(self, parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def apply(self, parts: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]: ...
    def derive(self, names: Collection[str], parts: dict[str, Any], rank: int) -> None: ...
    def adrift(self, parts: dict[str, Any]) -> bool: ...
    def close(self) -> None: ...


class Counter(Protocol):
    """A part, or a framework, that is told of each finished step. ``moved``: it knows of a change of the state since then."""

    def step_finished(self) -> None: ...
    def moved(self) -> bool: ...


def adapter(name: str | None, environment: Environment) -> Framework:
    """Of ``name``, else of the framework that the script has imported. Raises ValueError for another name."""
    if name in (None, "plain"):
        name = "pytorch" if "torch" in sys.modules else "tensorflow" if "tensorflow" in sys.modules else "plain"
    if name == "pytorch":
        from workers.frameworks.torch import Torch

        return Torch(environment.place, environment.launched)
    if name == "tensorflow":
        from workers.frameworks.tensorflow import TensorFlow

        return TensorFlow(environment.strategy, environment.devices)
    if name == "plain":
        from workers.frameworks.plain import Plain

        return Plain()
    raise ValueError(f"framework: {name!r} is not known; use pytorch, tensorflow or plain")
