"""State of code that uses no framework we know: objects with ``state_dict``, random generators, and plain trees of arrays.

Everything is the rank's own, because nothing says that ranks hold equal copies.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from workers.agreement import Store
from workers.checkpoint.tree import StateError


class Plain:
    """The adapter of plain code. ``device`` and ``strategy`` are None."""

    device: Any = None
    strategy: Any = None
    store: Store | None = None

    def capture(self, parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state equal on all ranks, state of this rank)."""
        return {}, {"parts": {name: state_of(part) for name, part in parts.items()}, "random": random_state()}

    def apply(self, parts: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Put the state in place; returns the parts, a plain tree replaced by what was saved."""
        loaded = {name: load_into(part, own["parts"][name]) for name, part in parts.items()}
        set_random_state(own["random"])
        return loaded

    def close(self) -> None:
        """Nothing is open."""


def state_of(part: Any) -> Any:
    """The state of one part as a tree."""
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if hasattr(part, "bit_generator"):  # numpy.random.Generator
        return part.bit_generator.state
    if hasattr(part, "get_state") and hasattr(part, "set_state"):  # torch.Generator, numpy.random.RandomState
        return part.get_state()
    return part


def load_into(part: Any, state: Any) -> Any:
    """Put ``state`` into ``part`` and return it; a plain tree cannot be changed in place, so the saved one is returned."""
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif hasattr(part, "bit_generator"):
        part.bit_generator.state = state
    elif hasattr(part, "get_state") and hasattr(part, "set_state"):
        part.set_state(state)
    else:
        return state
    return part


def in_place(part: Any) -> bool:
    """True where ``load_into`` changes the part itself."""
    return any(hasattr(part, name) for name in ("load_state_dict", "bit_generator", "set_state"))


def random_state() -> dict[str, Any]:
    """The state of Python's generator, and of NumPy's where it was imported."""
    version, words, gauss = random.getstate()
    if "numpy" not in sys.modules:
        return {"python": [version, list(words), gauss]}
    import numpy as np

    return {"python": [version, np.array(words, dtype=np.uint32), gauss], "numpy": np.random.get_state(legacy=False)}


def set_random_state(state: dict[str, Any]) -> None:
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(int(word) for word in words), gauss))
        if "numpy" in state:
            import numpy as np

            np.random.set_state(state["numpy"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the saved state of the random generators cannot be set: {error}") from error
