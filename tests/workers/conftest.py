"""Launchers for the tests of ranks: one for all scripts of a file, or one with a command of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.launched import Launched


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    made = Launched(tmp_path_factory.mktemp("launcher"), ["python", "case.py", "--name", "a b", "", "ü", "\udcff"])
    yield made
    made.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[list[str]], Launched]]:
    """A launcher with a command of its own."""
    made: list[Launched] = []

    def one(command: list[str]) -> Launched:
        made.append(Launched(tmp_path, command))
        return made[-1]

    yield one
    for each in made:
        each.close()
