"""A place for the snapshots of a few ranks, and their boards, as an agent and the ranks would leave them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm import Warm


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables leak into a test."""
    for name in list(os.environ):
        if name.startswith("KEEPSTEP_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A launcher that forks the ranks of tests."""
    made = Warm(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()
