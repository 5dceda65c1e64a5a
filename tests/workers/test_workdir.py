"""The working directory: it appears whole or not at all, once, and keeps what scripts write into it."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path

import fsspec
import pytest

from workers import workdir
from workers.checkpoint.storage import open_folder
from workers.workdir import CannotPrepare, UnusableBundle, local_path, prepare, saved_folder


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "job-x"


def bundle(path: Path, files: dict[str, str], modes: dict[str, int] | None = None) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (modes or {}).get(name, 0o644) << 16
            out.writestr(entry, text)
    return str(path)


@pytest.fixture
def code(tmp_path: Path) -> str:
    return bundle(tmp_path / "code.zip", {"train.py": "print(1)\n", "lib/a.py": "A = 1\n", "run.sh": "#!/bin/sh\n"}, {"run.sh": 0o755})


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a/b", Path("/a/b")),
        ("rel/x", Path("rel/x")),
        ("file:///a/b", Path("/a/b")),
        ("local:///a/b", Path("/a/b")),
        ("file:///a/my%20jobs", Path("/a/my%20jobs")),
        ("s3://bucket/x", None),
        ("memory://x", None),
    ],
)
def test_local_path(url: str, path: Path | None) -> None:
    assert local_path(url) == path


@pytest.mark.parametrize("url", ["/a/b", "file:///a/my%20jobs", "local:///a/b#c?d"])
def test_work_checkpoints_and_logs_lie_in_one_folder(url: str) -> None:
    _, as_logs_are_read = fsspec.url_to_fs(url)
    assert open_folder(url).url == str(local_path(url)) == as_logs_are_read


def test_unpacked_below_the_jobs_folder(storage: Path, code: str) -> None:
    work = prepare(str(storage), "job-x", code)
    assert (work, saved_folder(work)) == (storage / "work", storage / "saved")
    assert tree(work) == ["lib/a.py", "run.sh", "train.py"]
    assert (work / "train.py").read_text() == "print(1)\n"
    assert [stat.S_IMODE((work / name).stat().st_mode) & 0o111 for name in ("run.sh", "train.py")] == [0o111, 0]
    assert sorted(p.name for p in storage.iterdir()) == ["saved", "work"]


def test_without_a_bundle_it_is_empty(storage: Path) -> None:
    work = prepare(f"file://{storage}", "job-x", None)
    assert (work, tree(work), (storage / "saved").is_dir()) == (storage / "work", [], True)


def test_who_comes_later_keeps_what_a_script_wrote(storage: Path, code: str) -> None:
    """Another node, or a later attempt."""
    work = prepare(str(storage), "job-x", code)
    (work / "output.txt").write_text("mine")
    (work / "train.py").write_text("print(2)\n")
    (saved_folder(work) / "model").write_text("weights")
    assert prepare(str(storage), "job-x", code) == work
    assert (work / "output.txt").read_text() == "mine"
    assert (work / "train.py").read_text() == "print(2)\n"
    assert (storage / "saved" / "model").read_text() == "weights"


def test_it_is_unpacked_once(storage: Path, code: str) -> None:
    prepare(str(storage), "job-x", code)
    os.remove(code)
    assert tree(prepare(str(storage), "job-x", code)) == ["lib/a.py", "run.sh", "train.py"]


def test_the_node_that_is_second_takes_the_directory_of_the_first(storage: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found none and unpacked; only one rename can win."""
    unpack = workdir._unpack

    def another_is_faster(url: str, into: Path) -> None:
        unpack(url, into)
        (storage / "work").mkdir()
        (storage / "work" / "output.txt").write_text("of the first node")

    monkeypatch.setattr(workdir, "_unpack", another_is_faster)
    work = prepare(str(storage), "job-x", code)
    assert tree(work) == ["output.txt"]
    assert sorted(p.name for p in storage.iterdir()) == ["saved", "work"]


@pytest.mark.parametrize("name", ["workers/__init__.py", "workers.py", "workers/deep/x.txt"])
def test_code_that_hides_our_package_is_refused(storage: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UnusableBundle, match=r"hides KeepStep's own package `workers`.*rename it"):
        prepare(str(storage), "job-x", bundle(tmp_path / "code.zip", {"train.py": "", name: ""}))


@pytest.mark.parametrize("name", ["api/__init__.py", "orchestrator/x.py", "lib/workers.py", "workers_pool.py"])
def test_other_names_are_free(storage: Path, tmp_path: Path, name: str) -> None:
    assert name in tree(prepare(str(storage), "job-x", bundle(tmp_path / "code.zip", {name: ""})))


def test_a_bundle_that_is_no_zip(storage: Path, tmp_path: Path) -> None:
    (tmp_path / "code.zip").write_bytes(b"not a zip")
    with pytest.raises(UnusableBundle, match=r"work cannot be made: File is not a zip file"):
        prepare(str(storage), "job-x", str(tmp_path / "code.zip"))
    assert list(storage.iterdir()) == []


def test_a_bundle_that_was_cut(storage: Path, code: str) -> None:
    data = Path(code).read_bytes()
    Path(code).write_bytes(data[: len(data) // 2])
    with pytest.raises(CannotPrepare):
        prepare(str(storage), "job-x", code)
    assert not (storage / "work").exists()


def test_a_bundle_that_is_gone(storage: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotPrepare, match=r"No such file or directory.*none\.zip"):
        prepare(str(storage), "job-x", str(tmp_path / "none.zip"))
    assert list(storage.iterdir()) == []


def test_a_bundle_that_comes_back_whole_is_taken_at_the_next_try(storage: Path, tmp_path: Path) -> None:
    path = tmp_path / "code.zip"
    path.write_bytes(b"half")
    with pytest.raises(CannotPrepare):
        prepare(str(storage), "job-x", str(path))
    assert tree(prepare(str(storage), "job-x", bundle(path, {"train.py": ""}))) == ["train.py"]


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotPrepare, match="cannot be made") as caught:
        prepare(str(tmp_path / "file" / "job-x"), "job-x", None)
    assert not isinstance(caught.value, UnusableBundle)


def test_entries_stay_below_the_directory(storage: Path, tmp_path: Path) -> None:
    work = prepare(str(storage), "job-x", bundle(tmp_path / "code.zip", {"../../escaped.py": "", "/abs.py": ""}))
    assert tree(work) == ["abs.py", "escaped.py"]
    assert not (tmp_path / "escaped.py").exists()


def test_with_an_object_store_it_lies_on_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """The bundle comes through fsspec there."""
    import fsspec

    monkeypatch.setattr(workdir.tempfile, "gettempdir", lambda: str(tmp_path))
    with fsspec.open("memory://bundles/code.zip", "wb") as remote:
        remote.write(Path(code).read_bytes())
    work = prepare("memory://jobs/job-x", "job-x", "memory://bundles/code.zip")
    assert work == tmp_path / "keepstep" / "job-x" / "work"
    assert tree(work) == ["lib/a.py", "run.sh", "train.py"]


def test_a_bundle_with_a_flipped_byte(tmp_path: Path) -> None:
    path = tmp_path / "code.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("train.py", "print(1)\n" * 2000)
    data = bytearray(path.read_bytes())
    data[40] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CannotPrepare):
        prepare(str(tmp_path / "job"), "job-x", str(path))
