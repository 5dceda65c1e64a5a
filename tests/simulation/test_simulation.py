"""Seeded simulation of the whole control loop: ``--sim-seeds N`` runs seeds 0 to N - 1, ``--sim-seed S`` repeats one."""

from __future__ import annotations

import logging

import pytest

from tests.simulation.driver import Run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    one, many = metafunc.config.getoption("--sim-seed"), metafunc.config.getoption("--sim-seeds")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(many) if one is None else [one])


def test_everything_holds(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # calls that are lost on purpose are no news
    Run(seed).whole()
