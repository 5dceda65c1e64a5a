"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.schema import upgrade
from orchestrator.adapters.db.store import SqlStore


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here and not in tests/simulation, for pytest must know options before it looks into folders."""
    parser.addoption("--sim-seeds", type=int, default=200, help="how many seeds the simulation runs, from 0")
    parser.addoption("--sim-seed", type=int, default=None, help="run the simulation with this seed only")


def pytest_configure(config: pytest.Config) -> None:
    """Started in the background, a shell's child ignores SIGINT and so would all that tests start, though they interrupt some of it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test talks to the cluster or server of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("KEEPSTEP_") or name == "RAY_ADDRESS"]:
        monkeypatch.delenv(name)


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[SqlStore]:
    """An empty store in a file of its own."""
    engine = open_engine(f"sqlite:///{tmp_path}/keepstep.db")
    upgrade(engine)
    store = SqlStore(engine)
    yield store
    store.close()
