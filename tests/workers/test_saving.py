"""Which step is written to storage, and which of the checkpoints found there count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.make import rank, spec, status
from workers.checkpoint.format import FOLDER, MANIFEST, Share, Tree, folder_name
from workers.checkpoint.lease import OWNER, Fenced, Lease, claim, read_lease
from workers.checkpoint.writer import commit
from workers.listing import read_catalog
from workers.messages import AgentStatus, CheckpointFound, CheckpointRecord, GroupSpec
from workers.pacing import common_pin


def node(index: int, pinned: dict[int, int], step: int = 50) -> AgentStatus:
    """It holds one rank, which has finished ``step``."""
    return status(index, rank(index, step=step), pinned=pinned)


@pytest.mark.parametrize(
    ("statuses", "ready", "stale"),
    [
        pytest.param([node(0, {}), node(1, {})], None, set(), id="no pin"),
        pytest.param([node(0, {0: 50}), node(1, {1: 50})], 50, set(), id="all pinned the same step"),
        pytest.param([node(0, {0: 50}), node(1, {}, 49)], None, set(), id="one is not there yet"),
        pytest.param([node(0, {0: 50}), node(1, {}, 51)], None, set(), id="one may be just about to pin"),
        pytest.param([node(0, {0: 50}), node(1, {}, 52)], None, {50}, id="one has passed by"),
        pytest.param([node(0, {0: 60}), node(1, {1: 50})], None, {50}, id="an older pin is left over"),
        pytest.param([status(0, rank(0), rank(1), pinned={0: 50, 1: 50})], 50, set(), id="two ranks on one node"),
        pytest.param([status(0, rank(0), rank(1), pinned={0: 50})], None, set(), id="one of two on one node"),
        pytest.param([node(0, {0: 50})], None, set(), id="a node is not heard of"),
        pytest.param([status(0, rank(0, step=None), pinned={}), node(1, {1: 50})], None, set(), id="one has made no step"),
    ],
)
def test_common_pin(statuses: list[AgentStatus], ready: int | None, stale: set[int]) -> None:
    assert common_pin(statuses, 2) == (ready, stale)


@pytest.fixture
def given(tmp_path: Path) -> GroupSpec:
    """The third attempt of a job."""
    return spec(nodes=1, attempt=3, storage_url=str(tmp_path))


def write(given: GroupSpec, step: int, attempt: int = 3, generation: int = 4) -> CheckpointRecord:
    """A whole checkpoint, of a state without arrays."""
    share = Share(0, [0], [], Tree({"step": step}, []), {}, {}, 0.0)
    return commit(given.storage_url, given.job_id, attempt, generation, step, 1, [share], 1.0, 2.0)


def tear(given: GroupSpec, step: int, attempt: int = 3, generation: int = 4) -> Path:
    """What a write leaves that never ended."""
    folder = Path(given.storage_url) / FOLDER / folder_name(step, attempt, generation)
    folder.mkdir(parents=True)
    (folder / "shared-0.safetensors").write_bytes(b"half")
    return folder


def damage(record: CheckpointRecord) -> None:
    manifest = Path(record.url) / MANIFEST
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)


def found_in(given: GroupSpec) -> tuple[CheckpointFound, ...]:
    return read_catalog(given, -1)[0]


def short(found: tuple[CheckpointFound, ...]) -> list[tuple[int, bool]]:
    return [(c.step, c.problem is None) for c in found]


def test_an_empty_folder(given: GroupSpec) -> None:
    assert found_in(given) == ()


def test_a_write_that_never_ended_is_no_checkpoint(given: GroupSpec) -> None:
    """Before anything was ever committed: the job has lost nothing and starts from zero."""
    leading, ours, older = tear(given, 10), tear(given, 10, generation=3), tear(given, 10, attempt=2)
    assert found_in(given) == ()
    assert (leading.exists(), ours.exists(), older.exists()) == (True, False, False)


def test_beside_a_whole_one_it_is_passed_over(given: GroupSpec) -> None:
    record = write(given, 10)
    ours, older = tear(given, 20, generation=3), tear(given, 20, attempt=2)
    assert short(found_in(given)) == [(10, True), (20, False), (20, False)]  # told once, as skipped
    assert found_in(given) == (CheckpointFound(record.url, 10),)
    assert (ours.exists(), older.exists()) == (False, False)


def test_a_write_of_the_newest_generation_may_still_go_on(given: GroupSpec) -> None:
    record = write(given, 10, generation=3)
    leading = tear(given, 20)
    assert short(found_in(given)) == [(20, False), (10, True)]
    assert (leading.exists(), Path(record.url).exists()) == (True, True)


def test_where_all_that_was_committed_is_gone_it_counts_as_damaged(given: GroupSpec) -> None:
    """It may be all that is left, so nothing is removed and nothing starts from zero."""
    record = write(given, 10, attempt=2)
    (Path(record.url) / MANIFEST).unlink()
    torn = tear(given, 20, attempt=2)
    catalog = found_in(given)
    assert short(catalog) == [(20, False), (10, False)]
    assert {str(c.problem) for c in catalog} == {"it has no manifest, so it was never committed"}
    assert torn.exists()
    assert Path(record.url).exists()


def test_a_damaged_manifest_is_told_though_others_are_whole(given: GroupSpec) -> None:
    write(given, 10)
    damage(write(given, 20))
    assert short(found_in(given)) == [(20, False), (10, True)]


def test_a_damaged_manifest_alone(given: GroupSpec) -> None:
    record = write(given, 10)
    damage(record)
    assert short(found_in(given)) == [(10, False)]
    assert Path(record.url).exists()


def test_newest_first_by_attempt_then_generation_then_step(given: GroupSpec) -> None:
    """What a fenced attempt still commits never comes before what a later one wrote."""
    for step, attempt, generation in [(30, 1, 9), (20, 3, 1), (10, 3, 2), (12, 3, 2)]:
        write(given, step, attempt, generation)
    assert [c.step for c in found_in(given)] == [12, 10, 20, 30]


def test_a_renamed_folder_is_not_taken(given: GroupSpec) -> None:
    record = write(given, 10)
    Path(record.url).rename(Path(record.url).with_name(folder_name(99, 3, 4)))
    catalog = found_in(given)
    assert short(catalog) == [(99, False)]
    assert "the folder was renamed" in str(catalog[0].problem)


def test_the_folder_of_another_job_is_refused(given: GroupSpec) -> None:
    claim(given.storage_url, Lease("job-y", 9, 9))
    with pytest.raises(Fenced, match="belongs to job job-y, not to job-x; a folder belongs to one job: choose another"):
        read_catalog(given, -1)
    assert read_lease(given.storage_url) == Lease("job-y", 9, 9)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job_id": 1}', "null"])
def test_a_lease_that_cannot_be_understood_counts_as_none(given: GroupSpec, text: str) -> None:
    (Path(given.storage_url) / OWNER).write_text(text)
    assert read_lease(given.storage_url) is None
    claim(given.storage_url, Lease("job-x", 3, 4))
    assert read_lease(given.storage_url) == Lease("job-x", 3, 4)


def test_foreign_folders_are_left_alone(given: GroupSpec) -> None:
    foreign = Path(given.storage_url) / FOLDER / "mine"
    foreign.mkdir(parents=True)
    write(given, 10)
    assert short(found_in(given)) == [(10, True)]
    assert foreign.exists()
