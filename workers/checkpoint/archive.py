"""A whole checkpoint as a tar, made while it is read: nothing of it is kept in memory or on a disk.

Invariant: every byte is checked against the manifest before the archive ends; one that does not hold breaks the archive off, so that
whoever knows its size sees that it is not whole.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

from workers.checkpoint.catalog import checked_chunks, files_of
from workers.checkpoint.format import MANIFEST, FileEntry
from workers.checkpoint.storage import LocalFolder, RemoteFolder, open_folder

BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE


def archive(url: str) -> tuple[int, Iterator[bytes]]:
    """(size in bytes, the tar in chunks). Raises StateError where the manifest does not hold, OSError."""
    folder = open_folder(url)
    files = files_of(url)
    manifest = b"".join(folder.read(MANIFEST))
    name = url.rstrip("/").rsplit("/", 1)[-1]
    content = sum(BLOCK + _padded(size) for size in [len(manifest), *(file.bytes for file in files)])
    size = -(-(content + 2 * BLOCK) // RECORD) * RECORD
    return size, _chunks(folder, name, manifest, files, size - content)


def _chunks(folder: LocalFolder | RemoteFolder, name: str, manifest: bytes, files: list[FileEntry], end: int) -> Iterator[bytes]:
    yield _header(f"{name}/{MANIFEST}", len(manifest))
    yield manifest + _padding(len(manifest))
    for file in files:
        yield _header(f"{name}/{file.name}", file.bytes)
        yield from checked_chunks(folder, file)
        yield _padding(file.bytes)
    yield bytes(end)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)  # one block however large the file is


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _padding(size: int) -> bytes:
    return bytes(_padded(size) - size)
