"""Zips from strangers: what must be refused is refused, and nothing of it stays."""

from __future__ import annotations

import hashlib
import io
import stat
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from orchestrator.adapters.storage.bundles import MAX_PACKED
from tests.api.conftest import Running


def make(*entries: tuple[str, bytes] | tuple[zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # names that come twice are the point
        for name, data in entries:
            archive.writestr(name, data)
    return buffer.getvalue()


def link(name: str, target: str) -> tuple[zipfile.ZipInfo, bytes]:
    return special(name, stat.S_IFLNK)[0], target.encode()


def special(name: str, kind: int) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = (kind | 0o777) << 16
    return info, b""


def locked(data: bytes) -> bytes:
    """With the flag of encryption on every entry."""
    changed = bytearray(data)
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := data.find(mark, at + 1)) >= 0:
            changed[at + flags] |= 1
    return bytes(changed)


def squeezed(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def overlapping(count: int) -> bytes:
    """``count`` entries whose directory lines all point to the same bytes."""
    data = make(("00000000", bytes(1024**2)))
    begin, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    lines = b"".join(data[begin:end].replace(b"00000000", f"{number:08d}".encode()) for number in range(count))
    return data[:begin] + lines + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(lines), begin, 0)


def put(server: Running, data: bytes, sha: str | None = None) -> httpx.Response:
    return server.http.put(f"/api/v1/bundles/{sha or hashlib.sha256(data).hexdigest()}", content=data)


def left_over(server: Running) -> list[Path]:
    return [*Path(tempfile.gettempdir()).glob("keepstep-bundle-*"), *(server.state_dir / "storage").rglob("*")]


GOOD = make(("train.py", b"print(1)"), ("lib/model.py", b"x = 1"), ("lib/", b""), ("é/训练🚀.txt", b"ok"), ("lib/workers.py", b"fine here"))

BAD = {
    "parent": (make(("../x", b"1")), "leaves the folder"),
    "absolute": (make(("/etc/x", b"1")), "leaves the folder"),
    "parent inside": (make(("a/../../x", b"1")), "leaves the folder"),
    "drive": (make(("C:x", b"1")), "leaves the folder"),
    "backslash": (make(("..\\x", b"1")), "backslash"),
    "dot": (make(("./x", b"1")), "no plain path"),
    "double slash": (make(("a//x", b"1")), "no plain path"),
    "link, then a file through it": (make(link("a", "/etc"), ("a/x", b"1")), "is a link"),
    "link to a file": (make(link("a", "/etc/passwd")), "is a link"),
    "same name twice": (make(("a", b"1"), ("a", b"2")), "occurs twice"),
    "folder and file of one name": (make(("a", b"1"), ("a/", b"")), "occurs twice"),
    "file under a file": (make(("a", b"1"), ("a/b", b"2")), "is a file in the same archive"),
    "names that differ in case": (make(("lib/Net.py", b"1"), ("lib/net.py", b"2")), "differ in spelling only"),
    "names that differ in composition": (make(("\u00e9", b"1"), ("e\u0301", b"2")), "differ in spelling only"),
    "encrypted": (locked(make(("a", b"1"))), "encrypted; pack it without a password"),
    "other compression": (squeezed("a", b"1"), "only stored and deflate"),
    "entries that share their bytes": (overlapping(1000), "overlaps with"),
    "a device": (make(special("null", stat.S_IFCHR)), "special file"),
    "workers package": (make(("workers/__init__.py", b"")), "clashes"),
    "workers module": (make(("workers.py", b"")), "clashes"),
    "long name": (make(("x" * 2000, b"1")), "too long"),
    "no zip": (b"hello", "not a zip"),
    "empty": (b"", "not a zip"),
    "cut off": (GOOD[:-30], "not a"),
    "front missing": (GOOD[40:], "not a sound zip"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_archives_are_refused_and_leave_nothing(server: Running, what: str) -> None:
    data, reason = BAD[what]
    answer = put(server, data)
    assert (answer.status_code, answer.json()["code"]) == (422, "bad_bundle")
    assert reason in answer.json()["detail"]
    assert left_over(server) == []


def test_good_one_is_kept_once(server: Running) -> None:
    sha = hashlib.sha256(GOOD).hexdigest()
    assert server.http.head(f"/api/v1/bundles/{sha}").status_code == 404
    assert [put(server, GOOD).json() for _ in range(2)] == [{"bundle": sha}] * 2
    assert server.http.head(f"/api/v1/bundles/{sha}").status_code == 200
    assert [path.name for path in left_over(server) if path.is_file()] == [f"{sha}.zip"]
    assert (server.state_dir / "storage" / "bundles" / f"{sha}.zip").read_bytes() == GOOD
    server.submit(bundle=sha)


def test_wrong_sha_and_no_sha(server: Running) -> None:
    assert put(server, GOOD, "0" * 64).json()["code"] == "bad_bundle"
    assert put(server, GOOD, "..%2F..%2Fx").status_code in (404, 422)
    assert put(server, GOOD, "A" * 64).status_code == 422
    assert left_over(server) == []


def test_flipped_bytes_are_found(server: Running) -> None:
    data = bytearray(make(("a", b"\x00" * 10)))
    at = data.index(b"PK\x01\x02") + 16
    data[at] ^= 1  # CRC in the directory
    answer = put(server, bytes(data))
    assert answer.status_code == 422
    assert "CRC" in answer.json()["detail"]
    assert left_over(server) == []


def test_bombs(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.adapters.storage.zipcheck.MAX_UNPACKED", 50 * 1024**2)
    bomb = make(("zeros", bytes(60 * 1024**2)))
    assert len(bomb) < 100_000
    assert "unpacks to more than" in put(server, bomb).json()["detail"]
    # The directory claims one byte: the limit holds on what comes out.
    liar = bytearray(bomb)
    at = liar.index(b"PK\x01\x02") + 24
    liar[at : at + 4] = struct.pack("<I", 1)
    assert put(server, bytes(liar)).status_code == 422
    assert left_over(server) == []


def test_a_million_entries_are_refused_before_they_are_read(server: Running) -> None:
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0)
    directory = b"".join(entry + f"{n:08d}".encode() for n in range(60_000))
    for claimed in (60_000, 1):
        data = directory + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, claimed, claimed, len(directory), 0, 0)
        answer = put(server, data)
        assert answer.status_code == 422
        assert left_over(server) == []
    assert "50000 entries" in answer.json()["detail"]


def test_limit_holds_without_a_content_length(server: Running) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        while sent <= MAX_PACKED:
            sent += 1024**2
            yield bytes(1024**2)

    answer = server.http.put(f"/api/v1/bundles/{'0' * 64}", content=chunks())
    assert (answer.status_code, answer.json()["code"]) == (413, "bundle_too_large")
    assert left_over(server) == []
