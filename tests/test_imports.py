"""What an import costs the user: ``workers`` runs beside any training code and must bring no framework of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"ray", "torch", "tensorflow", "keras", "jax", "sqlalchemy", "alembic", "fastapi", "pydantic", "orchestrator", "api"}


def _imported(module: str) -> set[str]:
    program = f"import sys, json, {module}; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_workers_brings_no_framework() -> None:
    assert _imported("workers") & HEAVY == set()


@pytest.mark.parametrize("module", ["workers.run", "workers.messages", "workers.restart", "workers.launcher", "workers.checkpoint.storage"])
def test_no_part_of_a_rank_brings_more_than_its_framework(module: str) -> None:
    assert _imported(module) & (HEAVY - {"pydantic"}) == set()


def test_an_agent_without_a_cluster_brings_no_ray() -> None:
    """Ray reads its settings when it is imported, which is too early before those of the cluster are known."""
    assert "ray" not in _imported("workers.agent")


def test_a_program_that_imports_a_heavy_one_is_caught() -> None:
    assert "sqlalchemy" in _imported("orchestrator.adapters.db.tables")
