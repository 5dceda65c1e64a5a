"""The state of a group in shared memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.workers.make import NOW, ended, group, rank, ranks_seen
from workers.group import Doing, EndRequest, Kept
from workers.kept import NAME, read_kept, write_kept
from workers.messages import CheckpointFound, CheckpointRecord, Problem, RestoreOrder, Source, Unfit
from workers.restart import decide


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    failed = decide(group(Doing.TRAINING, training=True), ranks_seen(rank(0), ended(1, -9, NOW - 0.1)), NOW).group
    record = CheckpointRecord("job-x", 1, 3, 40, "/c/40", 9, 2, 2, NOW, 0.1)
    full = replace(
        failed,
        checkpoints=(record,),
        excluded=(CheckpointFound("/c/30", 30, Problem(Unfit.DAMAGED, "flipped")),),
        restore=RestoreOrder(Source.STORAGE, 40, "/c/40"),
        end=EndRequest(NOW, 5.0),
    )
    kept = Kept(3, 17, full)
    write_kept(tmp_path, kept)
    assert read_kept(tmp_path) == kept


def test_none_or_half_of_one_counts_as_none(tmp_path: Path) -> None:
    assert read_kept(tmp_path) is None
    write_kept(tmp_path, Kept(1, 1, group(Doing.PLACING)))
    data = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(data[: len(data) // 2])
    assert read_kept(tmp_path) is None
