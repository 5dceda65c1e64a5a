"""State of code that uses no framework we know: objects with ``state_dict``, random generators, and plain trees of arrays.

Everything is the rank's own, because nothing says that ranks hold equal copies.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Collection
from typing import Any

from workers.agreement import Store
from workers.checkpoint.tree import StateError


class Plain:
    """The adapter of plain code. ``device`` and ``strategy`` are None."""

    device: Any = None
    strategy: Any = None
    store: Store | None = None

    def begin(self, parts: dict[str, Any]) -> None:
        """Called by ``restore`` before anything is put in place. Raises StateError for a part that cannot be one."""
        for name, part in parts.items():
            refuse(name, part)

    def capture(self, parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state equal on all ranks, state of this rank)."""
        return {}, {"parts": {name: state_of(part) for name, part in parts.items()}, "random": random_state()}

    def apply(self, parts: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Put the state in place; returns the parts, a plain tree replaced by what was saved."""
        loaded = {name: load_into(part, own["parts"][name]) for name, part in parts.items()}
        set_random_state(own["random"])
        return loaded

    def derive(self, names: Collection[str], parts: dict[str, Any], rank: int) -> None:
        """Make the random generators ``names``, global ones or parts, those of ``rank``: from what they draw now and its number."""
        derive_random(names, rank)
        derive_generators(names, parts, rank)

    def adrift(self, parts: dict[str, Any]) -> bool:
        """Of steps that no rank waits for we know nothing."""
        return False

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
    if isinstance(part, random.Random):
        return _python_state(part.getstate())
    return part


def load_into(part: Any, state: Any) -> Any:
    """Put ``state`` into ``part`` and return it; a plain tree cannot be changed in place, so the saved one is returned."""
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif hasattr(part, "bit_generator"):
        part.bit_generator.state = state
    elif hasattr(part, "get_state") and hasattr(part, "set_state"):
        part.set_state(state)
    elif isinstance(part, random.Random):
        part.setstate(_python_tuple(state))
    else:
        return state
    return part


def is_generator(part: Any) -> bool:
    """Of random numbers."""
    return isinstance(part, random.Random) or hasattr(part, "bit_generator") or (hasattr(part, "get_state") and hasattr(part, "set_state"))


def seed_from(drawn: int, rank: int) -> int:
    """63 bits."""
    import numpy as np

    return int(np.random.SeedSequence([drawn, rank]).generate_state(1, np.uint64)[0]) >> 1


def derive_random(names: Collection[str], rank: int) -> None:
    """Python's and NumPy's global generators."""
    if "python" in names:
        random.seed(seed_from(random.getrandbits(62), rank))
    if "numpy" in names:
        import numpy as np

        np.random.seed(seed_from(int(np.random.randint(2**31)), rank) & 0xFFFFFFFF)


def derive_generators(names: Collection[str], parts: dict[str, Any], rank: int) -> None:
    for name in parts.keys() & names:
        part = parts[name]
        if isinstance(part, random.Random):
            part.seed(seed_from(part.getrandbits(62), rank))
        elif hasattr(part, "bit_generator"):
            part.bit_generator.state = type(part.bit_generator)(seed_from(int(part.integers(2**62)), rank)).state
        elif hasattr(part, "manual_seed"):
            drawn = sys.modules["torch"].randint(2**62, (1,), generator=part, device=part.device)
            part.manual_seed(seed_from(int(drawn), rank))
        else:
            part.seed(seed_from(int(part.randint(2**31)), rank) & 0xFFFFFFFF)


def refuse(name: str, part: Any) -> None:
    """Raises StateError for a part that has a place to go on from but no way to tell it."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(part, data.DataLoader) and not hasattr(part, "state_dict"):
        raise StateError(
            f"restore: {name} is a torch DataLoader, which has no position to save; name data = workers.data.Batches(len(dataset), "
            "batch_size) and iterate data.loader(dataset, num_workers=...), or use torchdata's StatefulDataLoader"
        )


def random_state() -> dict[str, Any]:
    """The state of Python's generator, and of NumPy's where it was imported."""
    state = {"python": _python_state(random.getstate())}
    numpy = sys.modules.get("numpy")
    return state if numpy is None else state | {"numpy": numpy.random.get_state(legacy=False)}


def set_random_state(state: dict[str, Any]) -> None:
    try:
        random.setstate(_python_tuple(state["python"]))
        if "numpy" in state:
            import numpy as np

            np.random.set_state(state["numpy"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the saved state of the random generators cannot be set: {error}") from error


_WORDS = struct.Struct("625I")  # of Python's generator


def _python_state(state: Any) -> list[Any]:
    version, words, gauss = state
    numpy = sys.modules.get("numpy")
    return [version, list(words) if numpy is None else numpy.frombuffer(_WORDS.pack(*words), numpy.uint32), gauss]


def _python_tuple(state: Any) -> Any:
    version, words, gauss = state
    return version, tuple(int(word) for word in words), gauss
