"""Code bundles: zips named by the sha256 of their bytes.

Invariants: a bundle under its final name is complete, checked and never changed; size and sha256 are taken from the bytes read, never
from a header; whatever goes wrong, no temporary file stays.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import fsspec

from orchestrator.adapters.storage import zipcheck
from orchestrator.adapters.storage.zipcheck import BadBundle

MAX_PACKED = 200 * 1024**2  # bytes
SHA256 = re.compile(r"[0-9a-f]{64}")


class BundleTooLarge(BadBundle):
    """More than MAX_PACKED bytes came."""


class Bundles:
    """All bundles below one folder or fsspec URL: ``<root>/<sha256>.zip``."""

    def __init__(self, root: str) -> None:
        self._fs, self._root = fsspec.url_to_fs(root)

    def exists(self, sha: str) -> bool:
        return SHA256.fullmatch(sha) is not None and bool(self._fs.exists(f"{self._root}/{_file_name(sha)}"))

    def put(self, sha: str, chunks: Iterable[bytes]) -> None:
        """Take, check and keep a bundle; keeping the same one again changes nothing. Raises BadBundle, BundleTooLarge, OSError."""
        name = _file_name(sha)
        with tempfile.NamedTemporaryFile(prefix="keepstep-bundle-") as file:
            found = _receive(file, chunks)
            if found != sha:
                raise BadBundle(f"the bytes that came have sha256 {found}, not {sha}; send the bundle again")
            file.flush()
            zipcheck.check(Path(file.name))
            if not self.exists(sha):
                self._store(Path(file.name), f"{self._root}/{name}")

    def _store(self, checked: Path, target: str) -> None:
        """Copy to the final name, in one step for readers."""
        part = f"{target}.part-{uuid.uuid4().hex}"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(checked), part)
            self._fs.mv(part, target)
        finally:
            if self._fs.exists(part):
                self._fs.rm(part)


def _receive(file: IO[bytes], chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_PACKED:
            raise BundleTooLarge(
                f"the bundle is larger than {MAX_PACKED // 1024**2} MiB; leave data out with .keepstepignore and read it "
                "from shared storage"
            )
        digest.update(chunk)
        file.write(chunk)
    return digest.hexdigest()


def _file_name(sha: str) -> str:
    if SHA256.fullmatch(sha) is None:
        raise BadBundle(f"{sha[:80]!r} is no sha256: 64 characters of 0-9a-f")
    return f"{sha}.zip"
