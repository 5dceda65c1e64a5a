"""What of a working directory goes into a bundle, and which folders are refused before anything is sent."""

from __future__ import annotations

import os
import socket
import zipfile
from pathlib import Path

import pytest

from api import packing
from api.packing import Found, PackingError, pack
from orchestrator.adapters.storage.bundles import Bundles


def fill(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder: Path) -> list[str]:
    with pack(folder).file as file, zipfile.ZipFile(file) as archive:
        return archive.namelist()


def test_same_files_give_the_same_bundle_and_the_server_takes_it(tmp_path: Path) -> None:
    code = tmp_path / "code"
    fill(code, train_DOT_py="print(1)", lib__model_DOT_py="x = 1", data__empty="")
    (code / "run.sh").write_text("#!/bin/sh\n")
    (code / "run.sh").chmod(0o755)
    first = pack(code)
    os.utime(code / "train.py", (1, 1))
    second = pack(code)
    assert first.sha256 == second.sha256
    with zipfile.ZipFile(second.file) as archive:
        assert archive.getinfo("run.sh").external_attr >> 16 & 0o777 == 0o755
        assert archive.getinfo("train.py").external_attr >> 16 & 0o777 == 0o644
    bundles = Bundles(str(tmp_path / "bundles"))
    bundles.put(first.sha256, iter([first.file.read()]))
    assert bundles.exists(first.sha256)


def test_ignore_rules_are_those_of_git(tmp_path: Path) -> None:
    fill(
        tmp_path, _DOT_git__HEAD="x", _DOT_gitignore="*.log\n/build/\n!keep.log\ndata/**\n!data/\n", a_DOT_log="", keep_DOT_log="",
        build__x="", sub__build__y="", sub__b_DOT_log="", sub__c_DOT_txt="", data__big="",
        deep___DOT_git__HEAD="", sub___DOT_gitignore="c.*\n",
    )  # fmt: skip
    ours = names(tmp_path)
    assert ours == [".gitignore", "keep.log", "sub/.gitignore", "sub/build/y"]
    fill(tmp_path, _DOT_keepstepignore="sub/\n")
    assert names(tmp_path) == [".gitignore", ".keepstepignore", "a.log", "build/x", "data/big", "keep.log"]


def test_links_inside_are_followed_and_loops_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, real__a="1")
    (tmp_path / "alias").symlink_to("real")
    assert names(tmp_path) == ["alias/a", "real/a"]
    (tmp_path / "real" / "up").symlink_to("..")
    with pytest.raises(PackingError, match=r"alias/up is a link to a folder above it|real/up is a link to a folder above it"):
        pack(tmp_path)
    (tmp_path / ".keepstepignore").write_text("up\n")
    assert "real/a" in names(tmp_path)
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(PackingError, match="round cannot be followed"):
        pack(tmp_path)


def test_special_and_unreadable_files_are_named(tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "sock"))
    with pytest.raises(PackingError, match="sock is no regular file"):
        pack(tmp_path)
    server.close()
    (tmp_path / "sock").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackingError, match="pipe is no regular file"):
        pack(tmp_path)
    (tmp_path / "pipe").unlink()
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(PackingError, match="gone cannot be followed"):
        pack(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").write_text("x")
    (tmp_path / "closed").chmod(0)
    with pytest.raises(PackingError, match="closed cannot be read"):
        pack(tmp_path)


def test_too_big_names_limit_size_and_culprits(tmp_path: Path) -> None:
    fill(tmp_path, train_DOT_py="x")
    with (tmp_path / "checkpoint.bin").open("wb") as file:
        file.truncate(3 * 1024**3)  # sparse: must be refused without being read
    with pytest.raises(PackingError, match=r"3072.0 MiB in 2 files; the limit is 2048.0 MiB. Largest: checkpoint.bin 3072.0 MiB, train.py"):
        pack(tmp_path)


def test_too_large_when_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_PACKED", 300_000)
    for number in range(7):
        (tmp_path / f"part{number}").write_bytes(os.urandom(100_000 + number))
    with pytest.raises(PackingError, match=r"Largest: part6 0\.1 MiB, part5 [0-9.]+ MiB, part4 0\.1 MiB, part3 0\.1 MiB, part2 0\.1 MiB\."):
        pack(tmp_path)


def test_file_that_shrinks_or_grows_while_packing(tmp_path: Path) -> None:
    path = tmp_path / "live"
    for counted, real in ((5, 3), (3, 5)):
        path.write_bytes(b"x" * real)
        with (
            zipfile.ZipFile(tmp_path / "out.zip", "w") as archive,
            pytest.raises(PackingError, match="live changed while it was packed"),
        ):
            packing._add(archive, Found("live", path, counted))


@pytest.mark.parametrize("name", ["workers.py", "workers/__init__.py"])
def test_name_of_our_user_api(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(PackingError, match="clashes with KeepStep's user API; rename it"):
        pack(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(PackingError, match="is not a folder"):
        pack(tmp_path / "nothing")
