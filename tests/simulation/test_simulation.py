"""Seeded simulation of the whole control loop. SIM_SEEDS=n: that many seeds; SIM_SEED=s: only that one."""

from __future__ import annotations

import os

import pytest

from tests.simulation.driver import Run

SEEDS = [int(os.environ["SIM_SEED"])] if "SIM_SEED" in os.environ else range(int(os.environ.get("SIM_SEEDS", "200")))


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_holds(seed: int) -> None:
    Run(seed).whole()
