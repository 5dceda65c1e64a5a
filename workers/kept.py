"""The coordinator's state as a file in a node's shared memory, so that it outlives coordinator and agents dying at the same time.

Invariant: the file appears whole or not at all; one that cannot be read counts as none.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from workers.group import Kept

NAME = "group.json"
_KEPT = TypeAdapter(Kept)


def write_kept(shm: Path, kept: Kept | None) -> None:
    """Raises OSError."""
    if kept is not None:
        fresh = shm / f"{NAME}.new"
        fresh.write_bytes(_KEPT.dump_json(kept))
        os.replace(fresh, shm / NAME)


def read_kept(shm: Path) -> Kept | None:
    try:
        return _KEPT.validate_json((shm / NAME).read_bytes())
    except (OSError, ValidationError):
        return None
