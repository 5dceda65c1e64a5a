"""Checkpoints in storage: complete or nothing, damage of every kind found, the previous one taken."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from workers.checkpoint import catalog as catalogue
from workers.checkpoint.catalog import catalog, remove, stage, sweep, unstage, verify
from workers.checkpoint.format import FOLDER, FileEntry, Share, Tree
from workers.checkpoint.reader import read_staged
from workers.checkpoint.slots import holdings
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.checkpoint.tree import StateError
from workers.checkpoint.writer import commit, write_share
from workers.messages import Problem, Unfit

NODES, PER_NODE = 2, 2
WORLD = NODES * PER_NODE


def shared(step: int) -> dict[str, Any]:
    return {"model": {f"w{i}": np.arange(100 * (i + 1), dtype=np.float32) + step for i in range(6)}, "lr": step / 10}


def own(step: int, rank: int) -> dict[str, Any]:
    return {"parts": {"data": {"sample": step}}, "random": np.arange(4) + rank} if rank else {"parts": {"data": {"sample": step}}}


def nodes(shm: Path) -> list[tuple[Path, list[int]]]:
    return [(shm / f"node{n}", [n * PER_NODE + i for i in range(PER_NODE)]) for n in range(NODES)]


def save(shm: Path, url: str, step: int, attempt: int = 1, generation: int = 0) -> str:
    """All that ranks, agents and coordinator do for one checkpoint; returns its URL."""
    shares = []
    for index, (folder, ranks) in enumerate(nodes(shm)):
        folder.mkdir(exist_ok=True)
        for local, rank in enumerate(ranks):
            SnapshotWriter(folder, Place(rank, WORLD, local, PER_NODE, generation), restored=0).write(
                step, shared(step), own(step, rank), pin=True
            )
        shares.append(over_the_wire(write_share(folder, url, step, attempt, generation, index, NODES, ranks)))
    return commit(url, "job", attempt, generation, step, WORLD, shares, started_at=10.0, now=12.5).url


def over_the_wire(share: Share) -> Share:
    data = json.loads(json.dumps(asdict(share)))
    data["files"] = [FileEntry(**entry) for entry in data["files"]]
    data["shared"] = Tree(**data["shared"])
    data["own"] = {rank: Tree(**tree) for rank, tree in data["own"].items()}
    assert Share(**data) == share
    return Share(**data)


def check_staged(shm: Path, url: str, step: int) -> None:
    for folder, ranks in nodes(shm):
        assert stage(url, folder, "staged", ranks, WORLD) is None
        for rank in ranks:
            found = read_staged(folder / "staged", rank, WORLD)
            assert found.step == step
            assert found.shared["lr"] == step / 10
            for name, value in shared(step)["model"].items():
                assert found.shared["model"][name].tobytes() == value.tobytes()
            assert found.own.keys() == own(step, rank).keys()
            if rank:
                assert found.own["random"].tolist() == own(step, rank)["random"].tolist()
        unstage(folder, "staged")
        assert not (folder / "staged").exists()


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        yield f"memory://keepstep-{os.getpid()}/job"
        filesystem = fsspec.filesystem("memory")
        if filesystem.exists(f"/keepstep-{os.getpid()}"):
            filesystem.rm(f"/keepstep-{os.getpid()}", recursive=True)
    else:
        yield str(tmp_path / "job dir") if request.param == "path" else f"file://{tmp_path}/job"


def test_save_list_stage(shm: Path, url: str) -> None:
    assert catalog(url) == []
    first, second = save(shm, url, 100), save(shm, url, 200, generation=1)
    refs = catalog(url)
    assert [(r.url, r.step, r.attempt, r.generation, r.world_size, r.problem) for r in refs] == [
        (second, 200, 1, 1, WORLD, None),
        (first, 100, 1, 0, WORLD, None),
    ]
    assert verify(first) is None
    check_staged(shm, first, 100)
    check_staged(shm, second, 200)
    remove(second)
    assert [r.step for r in catalog(url)] == [100]
    remove(second)  # again is harmless


def test_record_and_files(shm: Path, tmp_path: Path) -> None:
    folder = Path(save(shm, str(tmp_path), 100))
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json", "rank-1.safetensors", "rank-2.safetensors", "rank-3.safetensors", "shared-0.safetensors", "shared-1.safetensors",
    ]  # fmt: skip
    sizes = [(folder / f"shared-{n}.safetensors").stat().st_size for n in range(NODES)]
    assert max(sizes) < 1.5 * min(sizes)
    from safetensors.numpy import load_file

    arrays = load_file(folder / "shared-0.safetensors") | load_file(folder / "shared-1.safetensors")
    assert arrays["shared/model/w3"].tolist() == shared(100)["model"]["w3"].tolist()


def truncate(path: Path, keep: int) -> None:
    os.truncate(path, keep if keep >= 0 else max(0, path.stat().st_size + keep))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x04
    path.write_bytes(data)


def swap(folder: Path) -> None:
    a, b, c = folder / "rank-1.safetensors", folder / "rank-2.safetensors", folder / "c"
    a.rename(c), b.rename(a), c.rename(b)


DAMAGE: dict[str, Any] = {
    "empty file": lambda f: truncate(f / "shared-0.safetensors", 0),
    "half a file": lambda f: truncate(f / "shared-1.safetensors", (f / "shared-1.safetensors").stat().st_size // 2),
    "ten bytes short": lambda f: truncate(f / "rank-3.safetensors", -10),
    "flipped data byte": lambda f: flip(f / "shared-0.safetensors", -7),
    "flipped header byte": lambda f: flip(f / "shared-0.safetensors", 20),
    "flipped manifest byte": lambda f: flip(f / "manifest.json", 200),
    "half a manifest": lambda f: truncate(f / "manifest.json", 300),
    "empty manifest": lambda f: truncate(f / "manifest.json", 0),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "manifest only": lambda f: [p.unlink() for p in f.iterdir() if p.name != "manifest.json"],
    "swapped files": swap,
    "binary manifest": lambda f: (f / "manifest.json").write_bytes(b"\x80\x05\xff"),
    "list for a manifest": lambda f: (f / "manifest.json").write_text("[1]"),
    "empty folder": lambda f: [p.unlink() for p in f.iterdir()],
    "a folder for a file": lambda f: ((f / "shared-0.safetensors").unlink(), (f / "shared-0.safetensors").mkdir()),
    "renamed folder": lambda f: None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_previous_one_taken(shm: Path, tmp_path: Path, damage: str) -> None:
    url = str(tmp_path)
    save(shm, url, 100)
    newest = Path(save(shm, url, 200))
    DAMAGE[damage](newest)
    if damage == "renamed folder":
        newest = newest.rename(newest.with_name("step-000000000300.a1.g0"))
    assert (verify(str(newest)) is not None) or damage == "renamed folder"
    target, ranks = nodes(shm)[1]
    skipped = []
    for ref in catalog(url):
        problem = ref.problem or stage(ref.url, target, "staged", ranks, WORLD)
        if damage in ("ten bytes short", "swapped files") and problem is None:
            problem = stage(ref.url, nodes(shm)[0][0], "staged", nodes(shm)[0][1], WORLD)
        if problem is None:
            assert ref.step == 100
            break
        assert problem.why is Unfit.DAMAGED
        assert len(problem.text) > 15
        assert not list(target.glob(".staged*"))
        skipped.append(ref.step)
    else:
        pytest.fail("no checkpoint was taken")
    assert skipped == [300 if damage == "renamed folder" else 200]


def test_other_world_size_is_refused_with_both_numbers(shm: Path, tmp_path: Path) -> None:
    ref = save(shm, str(tmp_path), 100)
    problem = stage(ref, shm / "node0", "staged", [0], 3)
    assert problem is not None
    assert problem.why is Unfit.UNSUITED
    assert problem.text.startswith(
        f"it was written by {WORLD} ranks and this group has 3; run it with {WORLD} ranks, or let its script say"
    )


def test_newer_format_is_refused(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(save(shm, str(tmp_path), 100))
    outer = json.loads((folder / "manifest.json").read_text())
    outer["manifest"]["format"] = 99
    (folder / "manifest.json").write_text(json.dumps(outer))
    (ref,) = catalog(str(tmp_path))
    assert ref.problem == Problem(Unfit.UNSUITED, "the manifest has format 99, this version reads up to 1; use a newer KeepStep")
    assert verify(str(folder)) == ref.problem


def test_commit_refuses_what_is_not_whole(shm: Path, tmp_path: Path) -> None:
    url = str(tmp_path)
    save(shm, url, 100)
    shares = [write_share(f, url, 100, 1, 1, i, NODES, ranks) for i, (f, ranks) in enumerate(nodes(shm))]
    with pytest.raises(StateError, match=r"cover ranks \[0, 1\], the group has 4"):
        commit(url, "job", 1, 1, 100, WORLD, shares[:1], 0.0, 1.0)
    folder = tmp_path / FOLDER / "step-000000000100.a1.g1"
    truncate(folder / "shared-1.safetensors", -1)
    with pytest.raises(StateError, match="not committed"):
        commit(url, "job", 1, 1, 100, WORLD, shares, 0.0, 1.0)
    assert [r.problem for r in catalog(url)] == [Problem(Unfit.DAMAGED, "it has no manifest, so it was never committed"), None]


def test_nodes_that_differ_are_never_committed(shm: Path, tmp_path: Path) -> None:
    folder, ranks = nodes(shm)[0]
    folder.mkdir()
    for local, rank in enumerate(ranks):
        state = shared(100) | {"lr": float(rank)}
        SnapshotWriter(folder, Place(rank, WORLD, local, PER_NODE, 0), restored=0).write(100, state, {}, pin=True)
    with pytest.raises(StateError, match="ranks 0 and 1 differ"):
        write_share(folder, str(tmp_path), 100, 1, 0, 0, NODES, ranks)


def test_committed_is_never_written_again(shm: Path, tmp_path: Path) -> None:
    save(shm, str(tmp_path), 100)
    with pytest.raises(StateError, match="committed already"):
        save(shm, str(tmp_path), 100)


def test_sweep_removes_what_earlier_attempts_and_generations_left(shm: Path, tmp_path: Path) -> None:
    url = str(tmp_path)
    kept = save(shm, url, 100)
    torn = Path(save(shm, url, 200))
    (torn / "manifest.json").unlink()
    current = Path(save(shm, url, 300, attempt=2))
    (current / "manifest.json").unlink()
    assert sweep(url, attempt=2, generation=0) == [str(torn)]
    assert sorted(r.step for r in catalog(url)) == [100, 300]
    assert sweep(url, attempt=2, generation=1) == [str(current)]
    assert verify(kept) is None


def test_full_disk_leaves_the_previous_checkpoint_and_no_part(shm: Path, tmp_path: Path) -> None:
    import resource

    url = str(tmp_path)
    first = save(shm, url, 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StateError, match=r"DISK_FULL: .*File too large, though"):
            write_share(shm / "node0", url, 100, 1, 1, 0, NODES, [0, 1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert verify(first) is None
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".part")]


def test_no_room_to_stage(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = save(shm, str(tmp_path), 100)
    usage = shutil.disk_usage(shm)
    monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda path: usage._replace(free=10))
    problem = stage(url, shm / "node0", "staged", [0, 1], WORLD)
    assert problem is not None
    assert problem.why is Unfit.NO_ROOM
    assert "and 10 are free" in problem.text
    assert holdings(shm / "node0", [0, 1], verify=True)[0].valid
