"""What the environment tells a rank: its place in the group, its shared memory and where its state comes from.

Three cases: under KeepStep (KEEPSTEP_SHM is set), under another launcher that sets torchrun's variables, and alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.checkpoint.snapshot import Place


class BadEnvironment(Exception):
    """A variable that cannot be used; names it, its value and what is expected."""


@dataclass(frozen=True)
class RestoreFrom:
    """``staged``: name of a folder in shared memory that holds a checkpoint; None: the snapshots there."""

    step: int
    source: str
    staged: str | None


@dataclass(frozen=True)
class Environment:
    """``shm`` is None where no snapshots are taken. ``snapshot_every`` None: auto. ``every_steps`` None: no periodic checkpoint."""

    place: Place
    framework: str | None
    strategy: str | None
    devices: int | None
    shm: Path | None
    every_steps: int | None
    snapshot_every: int | None
    restore: RestoreFrom | None

    @property
    def launched(self) -> bool:
        """Other ranks may exist: a launcher gave this process a rank."""
        return self.shm is not None or self.place.world_size > 1


def read_environment(env: Mapping[str, str] = os.environ) -> Environment:
    """Raises BadEnvironment naming the variable."""
    shm = env.get("KEEPSTEP_SHM")
    prefix = "KEEPSTEP_" if shm else ""
    place = Place(
        rank=_number(env, f"{prefix}RANK", 0),
        world_size=_number(env, f"{prefix}WORLD_SIZE", 1),
        local_rank=_number(env, f"{prefix}LOCAL_RANK", 0),
        local_world_size=_number(env, f"{prefix}LOCAL_WORLD_SIZE", 1),
        generation=_number(env, "KEEPSTEP_GENERATION", 0),
    )
    if place.rank >= max(1, place.world_size):
        raise BadEnvironment(f"{prefix}RANK is {place.rank}, but {prefix}WORLD_SIZE is {place.world_size}; ranks count from 0")
    every = env.get("KEEPSTEP_SNAPSHOT_EVERY", "auto")
    return Environment(
        place=place,
        framework=env.get("KEEPSTEP_FRAMEWORK") or None,
        strategy=env.get("KEEPSTEP_STRATEGY") or None,
        devices=_number(env, "KEEPSTEP_DEVICES", 0) or None,
        shm=Path(shm) if shm else None,
        every_steps=_number(env, "KEEPSTEP_EVERY_STEPS", 0) or None,
        snapshot_every=None if every == "auto" else _number(env, "KEEPSTEP_SNAPSHOT_EVERY", 1),
        restore=_restore(env.get("KEEPSTEP_RESTORE")),
    )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise BadEnvironment(f"{name} is {text!r}; a whole number from 0 is expected")
    return int(text)


def _restore(text: str | None) -> RestoreFrom | None:
    try:
        value = json.loads(text or "null")
        return None if value is None else RestoreFrom(int(value["step"]), str(value["source"]), value.get("staged"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadEnvironment(f'KEEPSTEP_RESTORE is {text!r}; null or {{"step", "source", "staged"}} is expected') from error
