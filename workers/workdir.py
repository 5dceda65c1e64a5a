"""A rank's working directory: the unpacked bundle in the job's own folder, and the check that user code does not shadow ``workers``.

Invariants: a directory appears whole or not at all (unpacked beside, then renamed); a second node or a later attempt finds and keeps it,
with everything that the script has written there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path


class CannotPrepare(Exception):
    """The working directory cannot be made here and now; the message says why and what to do."""


class UnusableBundle(CannotPrepare):
    """Nor can it anywhere else: it is the code that must change."""


def local_path(url: str) -> Path | None:
    """The path of a local or network folder; None for an object store. As for fsspec, a percent sign in a ``file://`` URL is itself."""
    if url.startswith(("file://", "local://")):
        url = url.split("://", 1)[1]
    return None if "://" in url else Path(url)


def home_of(storage_url: str, job_id: str) -> Path:
    """The job's own folder; one in temporary files where its storage is an object store."""
    return local_path(storage_url) or Path(tempfile.gettempdir()) / "keepstep" / job_id


def prepare(storage_url: str, job_id: str, bundle_url: str | None) -> Path:
    """Make (or find) the working directory. Raises CannotPrepare, UnusableBundle."""
    home = home_of(storage_url, job_id)
    work = home / "work"
    try:
        if not work.is_dir():
            home.mkdir(parents=True, exist_ok=True)
            fresh = home / f".work.{uuid.uuid4().hex}"
            fresh.mkdir()
            try:
                if bundle_url is not None:
                    _unpack(bundle_url, fresh)
                fresh.rename(work)
            except OSError:
                if not work.is_dir():  # another node may have been first
                    raise
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        (home / "saved").mkdir(exist_ok=True)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UnusableBundle(f"working directory {work} cannot be made: {error}") from error
    except OSError as error:
        raise CannotPrepare(f"working directory {work} cannot be made: {error}") from error
    for name in ("workers", "workers.py"):
        if (work / name).exists():
            raise UnusableBundle(f"the bundle holds {name!r}, which hides KeepStep's own package `workers` from the script; rename it")
    return work


def saved_folder(work: Path) -> Path:
    """KEEPSTEP_CHECKPOINT_DIR: where a script keeps what it saves by itself."""
    return work.parent / "saved"


def _unpack(bundle_url: str, into: Path) -> None:
    """Entries were checked when the bundle came in; zipfile keeps them below ``into`` in any case. File modes are kept."""
    path = local_path(bundle_url)
    if path is None:
        import fsspec

        with fsspec.open(bundle_url, "rb") as remote, tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(remote, copy)
            _extract(zipfile.ZipFile(copy), into)
        return
    with zipfile.ZipFile(path) as bundle:
        _extract(bundle, into)


def _extract(bundle: zipfile.ZipFile, into: Path) -> None:
    for entry in bundle.infolist():
        target = Path(bundle.extract(entry, into))
        mode = (entry.external_attr >> 16) & 0o777
        if mode and target.is_file():
            os.chmod(target, mode | 0o600)


def missing(work: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Which of these files are not there, or cannot be looked for; relative names count from ``work``."""
    return tuple(name for name in names if not os.path.exists(work / name))
