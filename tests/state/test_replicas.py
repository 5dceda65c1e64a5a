"""Snapshots of replicated variables are cheap, for they are taken after every step."""

from __future__ import annotations

from pathlib import Path

from tests.state.group import alone


def test_what_all_replicas_share_is_read_from_one(tmp_path: Path) -> None:
    assert {"equal=True", "asked=[]"} <= alone("read_replicas.py", cwd=tmp_path).keys()
