"""The checkpoints of a job in storage: list, verify, bring to a node, remove.

Invariants: what keeps a checkpoint from being taken becomes a Problem, which tells damage from all else; only verified bytes reach a node
under the final name; a removed checkpoint loses its manifest first.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from workers.checkpoint.elastic import consents
from workers.checkpoint.format import (
    COMMITTED,
    FOLDER,
    MANIFEST,
    PINNED,
    FileEntry,
    Manifest,
    Unsuited,
    age_key,
    folder_name,
    parse_manifest,
    parse_name,
    rank_file,
)
from workers.checkpoint.lease import read_lease
from workers.checkpoint.storage import LocalFolder, RemoteFolder, open_folder
from workers.checkpoint.tree import StateError
from workers.messages import Problem, Unfit


class NoRoom(StateError):
    """The shared memory of this node does not hold it."""


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint folder. ``problem`` is set where its manifest already tells that it cannot be used; ``world_size`` is 0 then."""

    url: str
    step: int
    attempt: int
    generation: int
    world_size: int
    problem: Problem | None
    manifest: bool  # there is one, readable or not
    finite: bool = True  # see checkpoint.format
    job_id: str = ""  # as its manifest tells


def catalog(storage_url: str) -> list[CheckpointRef]:
    """Newest first (see checkpoint.format); only manifests are read. Raises OSError when storage itself cannot be read."""
    root = open_folder(storage_url).child(FOLDER)
    refs: list[CheckpointRef] = []
    unreadable: OSError | None = None
    for name in root.folders():
        parsed = parse_name(name)
        if parsed is None:
            continue
        folder = root.child(name)
        try:
            manifest = _manifest(folder)
            if (manifest.step, manifest.attempt, manifest.generation) != parsed:
                raise StateError(f"its manifest is that of step {manifest.step}, attempt {manifest.attempt}; the folder was renamed")
            refs.append(CheckpointRef(folder.url, *parsed, manifest.world_size, None, True, manifest.finite, manifest.job_id))
        except StateError as error:
            refs.append(CheckpointRef(folder.url, *parsed, 0, problem_of(error), folder.size(MANIFEST) is not None))
        except OSError as error:
            unreadable = error
            refs.append(CheckpointRef(folder.url, *parsed, 0, problem_of(error), True))
    if unreadable is not None and all(ref.problem for ref in refs):
        raise unreadable  # storage is at fault, not the checkpoints
    return sorted(refs, key=lambda r: age_key(r.step, r.attempt, r.generation), reverse=True)


def ever_committed(storage_url: str) -> bool:
    """True where some checkpoint was once whole: then a folder without a manifest may be a loss, else it is a write that never ended."""
    return open_folder(storage_url).child(FOLDER).size(COMMITTED) is not None


def problem_of(error: Exception) -> Problem:
    """What an error in reading a checkpoint says about it."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # of the memory that it was copied to
        return Problem(Unfit.NO_ROOM, f"shared memory ran full: {error}")
    if not isinstance(error, StateError):
        return Problem(Unfit.UNREADABLE, f"it cannot be read: {type(error).__name__}: {error}")
    why = next((why for kind, why in _SOUND.items() if isinstance(error, kind)), Unfit.DAMAGED)
    return Problem(why, str(error))


_SOUND: dict[type[StateError], Unfit] = {Unsuited: Unfit.UNSUITED, NoRoom: Unfit.NO_ROOM}


def verify(url: str) -> Problem | None:
    """Read every byte; None when all hold."""
    try:
        folder = open_folder(url)
        for file in _manifest(folder).files:
            for _ in checked_chunks(folder, file):
                pass
    except Exception as error:
        return problem_of(error)
    return None


def staged_name(url: str) -> str:
    """Name of a checkpoint's folder in shared memory."""
    return "staged-" + url.rstrip("/").rsplit("/", 1)[-1]


def files_of(url: str) -> list[FileEntry]:
    """The files of arrays of a checkpoint. Raises StateError, OSError."""
    return _manifest(open_folder(url)).files


def stage(url: str, shm: Path, name: str, ranks: Sequence[int], world_size: int) -> Problem | None:
    """Copy what ``ranks`` need to ``shm/name``, verified on the way; all of it where another number of ranks wrote it. None when it is
    there."""
    fresh: Path | None = None
    try:
        folder = open_folder(url)
        manifest = _manifest(folder)
        if manifest.world_size != world_size:
            if not consents(manifest.own.values()):
                raise Unsuited(
                    f"it was written by {manifest.world_size} ranks and this group has {world_size}; "
                    f"run it with {manifest.world_size} ranks, or let its script say run.restore(..., elastic=True)"
                )
            ranks = range(manifest.world_size)
        wanted = set(manifest.where.values()) | {rank_file(rank) for rank in ranks}
        files = [file for file in manifest.files if file.name in wanted]
        needed, free = sum(file.bytes for file in files), shutil.disk_usage(shm).free
        if needed > free:
            raise NoRoom(f"it needs {needed} bytes in {shm} and {free} are free; enlarge shared memory or use more nodes")
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=shm))  # an earlier call may still hang in storage
        for file in files:
            with open(fresh / file.name, "wb") as out:
                for chunk in checked_chunks(folder, file):
                    out.write(chunk)
        (fresh / MANIFEST).write_bytes(b"".join(folder.read(MANIFEST)))
        shutil.rmtree(shm / name, ignore_errors=True)
        fresh.rename(shm / name)
    except Exception as error:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        return problem_of(error)
    return None


def unstage(shm: Path, name: str) -> None:
    """Give the memory of a staged checkpoint back."""
    shutil.rmtree(shm / name, ignore_errors=True)


def clear_staged(shm: Path) -> None:
    """What an agent that was killed had staged, or was about to."""
    for pattern in ("staged-*", ".staged-*"):
        for folder in shm.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def sweep(storage_url: str, attempt: int, generation: int) -> list[str]:
    """Remove what earlier attempts and generations left without a manifest; returns the URLs."""
    root = open_folder(storage_url).child(FOLDER)
    removed = []
    for name in root.folders():
        parsed = parse_name(name)
        if parsed and parsed[1:] < (attempt, generation) and root.child(name).size(MANIFEST) is None:
            root.child(name).remove_all()
            removed.append(root.child(name).url)
    return removed


def discard(storage_url: str, step: int, attempt: int, generation: int) -> None:
    """Delete what a failed write left; never a committed checkpoint. Raises OSError."""
    folder = open_folder(storage_url).child(FOLDER).child(folder_name(step, attempt, generation))
    if folder.size(MANIFEST) is None:
        folder.remove_all()


def remove(url: str) -> bool:
    """Delete a checkpoint unless it is pinned: the manifest first, so that half of it is never taken for a whole. Raises OSError."""
    folder = open_folder(url)
    if folder.size(PINNED) is not None:
        return False
    folder.remove(MANIFEST)
    folder.remove_all()
    return True


def pin(url: str) -> bool:
    """Keep a checkpoint from retention; False where there is none any more. Raises OSError."""
    folder = open_folder(url)
    if folder.size(MANIFEST) is None:
        return False
    folder.write(PINNED, [])
    if folder.size(MANIFEST) is None:  # retention was at it
        folder.remove_all()
        return False
    return True


def unpin(url: str) -> None:
    open_folder(url).remove(PINNED)


def newest_generation(storage_url: str, attempt: int) -> int:
    """Newest generation of ``attempt`` that left anything in the job's folder: a checkpoint, whole or not, its lease or a log; -1: none."""
    lease = read_lease(storage_url)
    found = [lease.generation] if lease is not None and lease.attempt == attempt else []
    folder = open_folder(storage_url)
    parsed = [parse_name(name) for name in folder.child(FOLDER).folders()]
    found += [p[2] for p in parsed if p is not None and p[1] == attempt]
    found += [int(name[1:]) for name in folder.child("logs").child(f"a{attempt}").folders() if name[:1] == "g" and name[1:].isdecimal()]
    return max(found, default=-1)


def _manifest(folder: LocalFolder | RemoteFolder) -> Manifest:
    if folder.size(MANIFEST) is None:
        raise StateError("it has no manifest, so it was never committed")
    return parse_manifest(b"".join(folder.read(MANIFEST)))


def checked_chunks(folder: LocalFolder | RemoteFolder, file: FileEntry) -> Iterator[bytes]:
    """The chunks of ``file``; raises StateError at its end where size or checksum differ."""
    found = folder.size(file.name)
    if found != file.bytes:
        fault = "is missing" if found is None else f"has {found} bytes instead of {file.bytes}; it was truncated"
        raise StateError(f"{file.name} {fault}")
    digest, size = xxhash.xxh3_64(), 0
    for chunk in folder.read(file.name):
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    if size != file.bytes or digest.hexdigest() != file.xxh3:
        raise StateError(f"{file.name} does not match its checksum, its bytes were changed")
