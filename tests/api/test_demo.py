"""The demo proves exactness only if it fails when the proof does."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from api.demo import DemoFailed, Trained, require_equal

INCIDENT = {"recovery_seconds": 0.2, "message": "rank 1 was ended by SIGKILL"}
INTERRUPTED = Trained("ab" * 32, "To be", 0, [INCIDENT])
UNBROKEN = replace(INTERRUPTED, incidents=[])


def test_equal_weights_pass() -> None:
    require_equal(INTERRUPTED, UNBROKEN)


@pytest.mark.parametrize(
    ("interrupted", "unbroken", "words"),
    [
        (INTERRUPTED, replace(UNBROKEN, weights="ac" * 32), "the weights differ"),
        (INTERRUPTED, replace(UNBROKEN, weights=None), "without the hash"),
        (replace(INTERRUPTED, weights=None), replace(UNBROKEN, weights=None), "without the hash"),
        (replace(INTERRUPTED, incidents=[]), UNBROKEN, "no recovered incident"),
        (replace(INTERRUPTED, incidents=[INCIDENT | {"recovery_seconds": None}]), UNBROKEN, "no recovered incident"),
        (INTERRUPTED, replace(UNBROKEN, incidents=[INCIDENT]), "did not stay unbroken"),
    ],
)
def test_what_proves_nothing_fails(interrupted: Trained, unbroken: Trained, words: str) -> None:
    with pytest.raises(DemoFailed, match=words):
        require_equal(interrupted, unbroken)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_itself() -> None:
    shown = subprocess.run([sys.executable, "-m", "api.cli", "demo"], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    hashes = re.findall(r"(?:interrupted|unbroken) +([0-9a-f]{64})", shown.stdout)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "recovered in" in shown.stdout
