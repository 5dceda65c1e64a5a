"""Files of a job in durable storage: a local or network folder by plain system calls, anything else through fsspec.

Invariants: a written file is on the medium before its name counts (fsync of file and folder); an interrupted write leaves no file under
its final name; a full disk is told by what the file system says of its free space, whatever the error was, and how much is free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from workers.checkpoint.tree import StateError
from workers.disks import full
from workers.workdir import local_path

CHUNK = 8 << 20  # bytes per read
_FULL = {
    errno.ENOSPC: "free space or lower keep_last",
    errno.EDQUOT: "the quota of this user is used up; raise it or lower keep_last",
    errno.EFBIG: "no larger file is allowed there; raise the limit of file sizes",
}


class StorageFull(StateError):
    """The file system has no room. The message begins with DISK_FULL."""


def open_folder(url: str) -> LocalFolder | RemoteFolder:
    """The folder at ``url``, a path or an fsspec URL."""
    path = local_path(url)
    if path is not None:
        return LocalFolder(path)
    import fsspec

    filesystem, prefix = fsspec.url_to_fs(url)
    return RemoteFolder(filesystem, prefix, url.rstrip("/"))


def unusable(url: str) -> str | None:
    """Why no folder can be at ``url`` as far as this machine knows, with the remedy; None: nothing speaks against it."""
    path = local_path(url)
    if path is not None:
        there = next((p for p in (path, *path.parents) if p.exists()), path)
        return None if there.is_dir() else f"{there} is a file, so no folder can be at {path}; choose another"
    import fsspec

    try:
        fsspec.get_filesystem_class(url.split("://", 1)[0])
    except ValueError as error:
        return f"{error}; use an absolute path, s3:// or another scheme that fsspec knows"
    except ImportError as error:
        return f"{error}, on the server and on every node (for s3:// that is the extra `s3` of keepstep)"
    return None


class LocalFolder:
    """A folder on a file system of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = str(path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def folders(self) -> list[str]:
        """Names of the folders in it; empty when it does not exist."""
        try:
            return sorted(entry.name for entry in os.scandir(self._path) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        try:
            return (self._path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """(bytes, xxh3 in hex). Raises StorageFull, OSError; the old file, if any, is then untouched and no part is left."""
        made = not self._path.exists()
        fresh = self._path / f".{name}.{os.getpid()}.part"
        digest, size = xxhash.xxh3_64(), 0
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with open(fresh, "wb", buffering=0) as file:
                for chunk in chunks:
                    digest.update(chunk)  # first: it brings in the pages of a mapped snapshot, whose faults slow a write several times
                    _write_all(file, chunk)
                    size += len(chunk)
                os.fsync(file.fileno())
            os.replace(fresh, self._path / name)
        except OSError as error:
            why = _why_full(self._path, error)  # while the part still takes its room
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            if why is not None:
                raise StorageFull(f"DISK_FULL: {self._path / name} ended at {size} bytes; {why}") from error
            raise
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        _sync_folder(self._path)
        if made:
            _sync_folder(self._path.parent)
        return size, digest.hexdigest()

    def read(self, name: str) -> Iterator[bytes]:
        """The file in chunks. Raises OSError."""
        with open(self._path / name, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)
        if self._path.is_dir():
            _sync_folder(self._path)

    def remove_all(self) -> None:
        """The folder with all in it, wherever a link leads; a name that something else removed meanwhile is fine."""
        shutil.rmtree(self._path.resolve(), ignore_errors=True)
        if self._path.is_symlink():
            self._path.unlink(missing_ok=True)

    def exists(self) -> bool:
        return self._path.exists()


class RemoteFolder:
    """A prefix of an object store or another fsspec file system. A put is atomic there, so no temporary name is used."""

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._fs = filesystem
        self._path = path.rstrip("/")
        self.url = url

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._fs, f"{self._path}/{name}", f"{self.url}/{name}")

    def folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory")

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            return int(self._fs.info(f"{self._path}/{name}")["size"])
        except FileNotFoundError:
            return None

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """(bytes, xxh3 in hex). Raises what the file system raises."""
        digest, size = xxhash.xxh3_64(), 0
        self._fs.makedirs(self._path, exist_ok=True)
        with self._fs.open(f"{self._path}/{name}", "wb", block_size=CHUNK) as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        return size, digest.hexdigest()

    def read(self, name: str) -> Iterator[bytes]:
        with self._fs.open(f"{self._path}/{name}", "rb", block_size=CHUNK) as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def remove(self, name: str) -> None:
        if self.size(name) is not None:
            self._fs.rm_file(f"{self._path}/{name}")

    def remove_all(self) -> None:
        self._fs.invalidate_cache()
        if self._fs.exists(self._path):
            self._fs.rm(self._path, recursive=True)

    def exists(self) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path))


def _why_full(path: Path, error: OSError) -> str | None:
    """Why nothing more fits below ``path``, with the remedy; None where the file system has room and ``error`` names no limit."""
    place = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    told = full([str(place)])
    if told is not None:
        return f"{told}; {_FULL[errno.ENOSPC]}"
    if error.errno in _FULL:
        return f"{error.strerror}, though {shutil.disk_usage(place).free} bytes are free on {place}; {_FULL[error.errno]}"
    return None


def _write_all(file: BinaryIO | Any, chunk: bytes | memoryview) -> None:
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
