"""Packs a working directory into a bundle, on the client.

Ignored: ``.git``, and whatever ``.keepstepignore`` or ``.gitignore`` (same syntax; the first that exists in a folder counts for that
folder) leave out. Symbolic links to files and folders inside are followed; the zip holds plain files only. Invariants: the same files
give the same zip, byte for byte; nothing is sent before all was packed and found within the limits.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pathspec

from orchestrator.adapters.storage.bundles import MAX_PACKED
from orchestrator.adapters.storage.zipcheck import MAX_ENTRIES, MAX_UNPACKED

IGNORE_FILES = (".keepstepignore", ".gitignore")
MIB = 1024 * 1024
CHUNK = MIB
EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time that a zip can hold


class PackingError(Exception):
    """The folder cannot be packed; the text names path, limit and remedy."""


@dataclass(frozen=True)
class Found:
    """A file to pack: ``name`` as in the zip, size in bytes."""

    name: str
    path: Path
    size: int


@dataclass
class Packed:
    """A finished bundle in a temporary file that vanishes when it is closed."""

    sha256: str
    size: int
    files: int
    file: IO[bytes]


def pack(folder: Path) -> Packed:
    """The bundle of a folder. Raises PackingError."""
    if not folder.is_dir():
        raise PackingError(f"working_dir: {folder} is not a folder")
    files = sorted(_walk(folder), key=lambda found: found.name)
    _check_limits(files)
    target = tempfile.TemporaryFile(prefix="keepstep-pack-")  # noqa: SIM115 - handed to the caller
    try:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for found in files:
                _add(archive, found)
        size = target.tell()
        if size > MAX_PACKED:
            raise PackingError(f"working_dir: packs to {_mib(size)}; the limit is {_mib(MAX_PACKED)}. {_largest(files)}")
        target.seek(0)
        digest = hashlib.file_digest(target, "sha256").hexdigest()
        target.seek(0)
    except BaseException:
        target.close()
        raise
    return Packed(digest, size, len(files), target)


def _walk(root: Path) -> Iterator[Found]:
    """Files that are not ignored. A folder is entered once on each way down, so loops of links end in an error and not in a loop."""
    pending: list[tuple[Path, str, tuple[Path, ...], tuple[tuple[str, pathspec.GitIgnoreSpec], ...]]] = [(root, "", (root.resolve(),), ())]
    while pending:
        folder, prefix, above, rules = pending.pop()
        rules = (*rules, *_rules(folder, prefix))
        for entry in _listed(folder):
            name = f"{prefix}{entry.name}"
            is_folder = _kind(entry, name) == "folder"
            if entry.name == ".git" or _ignored(rules, f"{name}/" if is_folder else name):
                continue
            if is_folder:
                target = Path(entry.path).resolve()
                if target in above:
                    raise PackingError(f"working_dir: {name} is a link to a folder above it; remove it or list it in .keepstepignore")
                pending.append((Path(entry.path), f"{name}/", (*above, target), rules))
            else:
                yield _file(entry, name)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise PackingError(f"working_dir: folder {folder} cannot be read ({error.strerror}); list it in .keepstepignore") from error


def _kind(entry: os.DirEntry[str], name: str) -> str:
    try:
        return "folder" if entry.is_dir() else "file"
    except OSError as error:  # ELOOP
        raise PackingError(f"working_dir: {name} cannot be followed ({error.strerror}); remove it or list it in .keepstepignore") from error


def _file(entry: os.DirEntry[str], name: str) -> Found:
    remedy = "remove it or list it in .keepstepignore"
    try:
        info = entry.stat()
    except OSError as error:
        raise PackingError(f"working_dir: {name} cannot be followed ({error.strerror}); {remedy}") from error
    if not stat.S_ISREG(info.st_mode):
        raise PackingError(f"working_dir: {name} is no regular file but a socket, pipe or device; {remedy}")
    if not os.access(entry.path, os.R_OK):
        raise PackingError(f"working_dir: {name} cannot be read (Permission denied); give read permission or list it in .keepstepignore")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise PackingError(f"working_dir: {name!r} has no valid UTF-8 name; rename it or list it in .keepstepignore") from None
    if "\\" in name:
        raise PackingError(f"working_dir: {name} has a backslash in its name; rename it or list it in .keepstepignore")
    return Found(name, Path(entry.path), info.st_size)


def _rules(folder: Path, prefix: str) -> list[tuple[str, pathspec.GitIgnoreSpec]]:
    for candidate in IGNORE_FILES:
        path = folder / candidate
        if path.is_file():
            try:
                return [(prefix, pathspec.GitIgnoreSpec.from_lines(path.read_text("utf-8").splitlines()))]
            except (OSError, ValueError) as error:
                raise PackingError(f"working_dir: {prefix}{candidate} cannot be used: {error}") from error
    return []


def _ignored(rules: tuple[tuple[str, pathspec.GitIgnoreSpec], ...], name: str) -> bool:
    """As git does: the rule nearest to the file that says anything about it decides."""
    for prefix, spec in reversed(rules):
        verdict = spec.check_file(name.removeprefix(prefix)).include
        if verdict is not None:
            return verdict
    return False


def _check_limits(files: list[Found]) -> None:
    if len(files) > MAX_ENTRIES:
        raise PackingError(f"working_dir: has {len(files)} files; the limit is {MAX_ENTRIES}. {_largest(files)}")
    total = sum(found.size for found in files)
    if total > MAX_UNPACKED:
        raise PackingError(f"working_dir: has {_mib(total)} in {len(files)} files; the limit is {_mib(MAX_UNPACKED)}. {_largest(files)}")
    clash = next((f.name for f in files if f.name == "workers.py" or f.name.startswith("workers/")), None)
    if clash is not None:
        raise PackingError(f"working_dir: {clash}: a top-level `workers` module clashes with KeepStep's user API; rename it")


def _largest(files: list[Found]) -> str:
    """The five largest paths, whole folders at the top level taken as one."""
    sizes: dict[str, int] = {}
    for found in files:
        top, slash, _ = found.name.partition("/")
        sizes[top + slash] = sizes.get(top + slash, 0) + found.size
        if slash:
            sizes[found.name] = found.size
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    listed = ", ".join(f"{name} {_mib(size)}" for name, size in largest)
    return f"Largest: {listed}. Leave what the job does not need out with .keepstepignore; read data from shared storage"


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def _add(archive: zipfile.ZipFile, found: Found) -> None:
    """Add one file; exactly the size that was counted, so that a file that changes meanwhile is noticed."""
    info = zipfile.ZipInfo(found.name, EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    try:
        with found.path.open("rb") as source:
            mode = os.fstat(source.fileno()).st_mode
            info.external_attr = (stat.S_IFREG | (0o755 if mode & 0o100 else 0o644)) << 16
            written = 0
            with archive.open(info, "w", force_zip64=found.size > 2**31) as target:
                while chunk := source.read(CHUNK):
                    written += len(chunk)
                    if written > found.size:
                        break
                    target.write(chunk)
    except OSError as error:
        raise PackingError(f"working_dir: {found.name} cannot be read ({error.strerror})") from error
    if written != found.size:
        raise PackingError(f"working_dir: {found.name} changed while it was packed; submit again when nothing writes to it")
