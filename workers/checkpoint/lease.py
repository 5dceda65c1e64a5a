"""Whose folder it is: ``owner.json`` in a job's folder names the job, attempt and generation that may commit there.

Invariants: a folder belongs to one job for ever; its lease only grows, by attempt, then generation; who holds less than what the file says
has been replaced and commits nothing. The file is put whole, so that it is never seen half; one that cannot be understood counts as none,
since the names of folders keep attempts apart too.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

from workers.checkpoint.storage import open_folder
from workers.checkpoint.tree import StateError

OWNER = "owner.json"


@dataclass(frozen=True)
class Lease:
    job_id: str
    attempt: int
    generation: int


class Fenced(StateError):
    """The folder is led by a later attempt or generation, or belongs to another job."""


def read_lease(storage_url: str) -> Lease | None:
    """Raises OSError."""
    folder = open_folder(storage_url)
    if folder.size(OWNER) is None:
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(b"".join(folder.read(OWNER)))
        return Lease(str(found["job_id"]), int(found["attempt"]), int(found["generation"]))
    return None


def claim(storage_url: str, lease: Lease) -> None:
    """Take the folder, or raise it to ``lease``. Raises Fenced, OSError."""
    held = check(storage_url, lease)
    if held != lease:
        open_folder(storage_url).write(OWNER, [json.dumps(asdict(lease)).encode()])


def check(storage_url: str, lease: Lease) -> Lease | None:
    """The lease that the folder has now; none above ``lease``. Raises Fenced, OSError."""
    held = read_lease(storage_url)
    if held is None:
        return None
    if held.job_id != lease.job_id:
        raise Fenced(
            f"{storage_url} belongs to job {held.job_id}, not to {lease.job_id}; a folder belongs to one job: "
            f"choose another checkpoint.storage, or remove {OWNER} there if that job is gone for good"
        )
    if (held.attempt, held.generation) > (lease.attempt, lease.generation):
        raise Fenced(
            f"attempt {lease.attempt}, generation {lease.generation} was replaced by attempt {held.attempt}, generation {held.generation}, "
            "so it may not commit"
        )
    return held
