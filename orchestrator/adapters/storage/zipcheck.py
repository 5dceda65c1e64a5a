"""Decides whether a zip from a stranger may be unpacked on training nodes.

Invariant: nothing is ever written while checking; every limit holds on the bytes that come out of the archive, not on what its
directory claims. The node that unpacks it later may rely on: plain relative names, regular files and folders only, no name twice.
"""

from __future__ import annotations

import re
import stat
import struct
import unicodedata
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

MAX_ENTRIES = 50_000
MAX_UNPACKED = 2 * 1024**3  # bytes
MAX_NAME = 1024  # bytes of UTF-8
CHUNK = 1024 * 1024
DRIVE = re.compile(r"^[A-Za-z]:")
METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
END_OF_DIRECTORY = b"PK\x05\x06"
LOCAL_HEADER = 30  # bytes, without name and extra field


class BadBundle(Exception):
    """The archive is refused; the text says what is wrong, the limit and the remedy."""


def check(path: Path) -> None:
    """Read the whole archive once and raise BadBundle at the first thing that must not be unpacked."""
    try:
        with path.open("rb") as file:
            _claimed_entries(file)
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_names(entries)
            _check_places(entries)
            _check_content(archive, entries)
    except (zipfile.BadZipFile, struct.error, NotImplementedError, EOFError, zlib.error, ValueError, OSError) as error:
        raise BadBundle(f"not a sound zip archive: {error}; pack it again") from error


def _claimed_entries(file: BinaryIO) -> None:
    """Refuse a directory of millions of entries before the zip module builds an object for each."""
    size = file.seek(0, 2)
    start = max(0, size - 65_557 - 20)  # the end record with its longest comment, and the zip64 locator before it
    file.seek(start)
    tail = file.read()
    at = tail.rfind(END_OF_DIRECTORY)
    if at < 0 or len(tail) < at + 22:
        raise BadBundle("not a zip archive: its end record is missing; pack it again")
    total, directory_bytes = struct.unpack_from("<HI", tail, at + 10)
    # 46 bytes is the least that an entry takes in the directory, whatever the count claims.
    if (total != 0xFFFF and total > MAX_ENTRIES) or directory_bytes > MAX_ENTRIES * (46 + MAX_NAME + 64):
        raise BadBundle(_too_many())


def _too_many() -> str:
    return f"more than {MAX_ENTRIES} entries; leave data out with .keepstepignore and read it from shared storage"


def _check_names(entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise BadBundle(_too_many())
    seen: set[str] = set()
    spelled: dict[str, str] = {}
    files: set[str] = set()
    for entry in entries:
        name = entry.filename
        _check_name(name, entry.orig_filename)
        mode = entry.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise BadBundle(f"{name!r} is a link or a special file; only regular files and folders are taken")
        if entry.flag_bits & 0x1:
            raise BadBundle(f"{name!r} is encrypted; pack it without a password")
        if entry.compress_type not in METHODS:
            raise BadBundle(f"{name!r} uses compression method {entry.compress_type}; only stored and deflate are taken")
        plain = name.rstrip("/")
        if plain in seen:
            raise BadBundle(f"{name!r} occurs twice; every name may occur once")
        seen.add(plain)
        other = spelled.setdefault(unicodedata.normalize("NFC", plain).casefold(), plain)
        if other != plain:
            raise BadBundle(f"{plain!r} and {other!r} differ in spelling only, and some file systems hold one of them; rename one")
        if not entry.is_dir():
            files.add(plain)
    for plain in seen:
        parts = plain.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in files:
                raise BadBundle(f"{plain!r} lies under a name that is a file in the same archive")
    if any(plain == "workers.py" or plain.split("/")[0] == "workers" for plain in files):
        raise BadBundle("a top-level `workers` module clashes with KeepStep's user API; rename it")


def _check_places(entries: list[zipfile.ZipInfo]) -> None:
    """Each entry has bytes of its own: many that share the same ones unpack to far more than a zip can otherwise hold."""
    for entry, following in pairwise(sorted(entries, key=lambda entry: entry.header_offset)):
        if following.header_offset < entry.header_offset + LOCAL_HEADER + entry.compress_size:
            raise BadBundle(f"{entry.filename!r} overlaps with {following.filename!r}; pack the archive again")


def _check_name(name: str, raw: str) -> None:
    parts = name.rstrip("/").split("/")
    if "\x00" in raw or "\\" in raw:
        raise BadBundle(f"{raw!r} has a backslash or NUL in its name; use plain relative paths with '/'")
    if name.startswith("/") or DRIVE.match(name) or any(part in ("", ".", "..") for part in parts):
        raise BadBundle(f"{name!r} leaves the folder or is no plain path; use plain relative paths with '/'")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME:
        raise BadBundle(f"a name of {len(name)} characters is too long; the limit is {MAX_NAME} bytes")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise BadBundle(f"{name!r} is not valid Unicode; rename it") from None


def _check_content(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> None:
    """Unpack into nothing: counts real bytes and lets the zip module compare every CRC."""
    total = 0
    for entry in entries:
        if entry.is_dir():
            continue
        with archive.open(entry) as content:
            while chunk := content.read(CHUNK):
                total += len(chunk)
                if total > MAX_UNPACKED:
                    raise BadBundle(
                        f"unpacks to more than {MAX_UNPACKED // 1024**2} MiB; leave data out with .keepstepignore "
                        "and read it from shared storage"
                    )
