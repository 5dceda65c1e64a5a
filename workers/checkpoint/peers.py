"""Parts of snapshots that nodes hold for each other, as files in a node's shared memory; ``workers.exchange`` moves them.

A memory checkpoint of a step is the folder ``copies-<step>`` on every node: ``snap-<rank>-0`` as in the slot for each of the node's own
ranks, and for each rank of the node before it a file with nothing but the header and what is the rank's own; the rest of it is a hole that
takes no memory. Invariants: a file appears in such a folder whole or not at all; a giver verifies a part before it offers it, a taker when
it has come; a slot that is filled becomes COMPLETE after its last byte.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.checkpoint.slots import COMPLETE, HEADER, WRITING, Header, checksum, headers, mapped, parse_header, read_header, slot_path
from workers.checkpoint.tree import StateError
from workers.messages import Copy, Offer

SHARED, OWN = "shared", "own"
CHUNK = 16 << 20  # bytes that are under way at once
_FOLDER = re.compile(r"copies-(\d+)")
_FILE = re.compile(r"snap-(\d+)-0")
_NAME = re.compile(r"(copies-\d+/)?snap-\d+-\d")
_NEW = ".new"


# memory checkpoints


def copies(shm: Path, ranks: Collection[int]) -> tuple[Copy, ...]:
    """What memory checkpoints are here; those of ``ranks``, the node's own, are whole. Their bytes are not looked at."""
    found = []
    for folder in shm.glob("copies-*"):
        if step := _FOLDER.fullmatch(folder.name):
            numbers = [int(file[1]) for name in _names(folder) if (file := _FILE.fullmatch(name))]
            found += [Copy(rank, int(step[1]), rank in ranks) for rank in sorted(numbers)]
    return tuple(sorted(found, key=lambda c: (c.step, c.rank)))


def drop_copies(shm: Path, keep: Callable[[int], bool]) -> None:
    """Remove the memory checkpoints of all steps that ``keep`` does not want."""
    for folder in shm.glob("copies-*"):
        step = _FOLDER.fullmatch(folder.name)
        if step and not keep(int(step[1])):
            shutil.rmtree(folder, ignore_errors=True)


def copy_slots(shm: Path, ranks: Sequence[int], step: int, wanted: Callable[[], bool]) -> list[Path]:
    """Copy the slots of ``step``, which must be pinned; the copies count once they are published. Gives up when they are not ``wanted``
    any more. Raises StateError, OSError."""
    return [_copy_slot(shm, rank, step, wanted) for rank in ranks]


def _copy_slot(shm: Path, rank: int, step: int, wanted: Callable[[], bool]) -> Path:
    source, header = _slot(shm, rank, step)
    target = copy_path(shm, rank, step)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with open(source, "rb") as taken, open(target, "wb", buffering=0) as out:
        out.write(replace(header, state=COMPLETE, pinned=False).pack())
        out.seek(HEADER)
        at = HEADER
        while at < header.end:
            if not wanted():
                raise StateError(f"step {step}: its generation has ended")
            count = os.sendfile(out.fileno(), taken.fileno(), at, min(CHUNK, header.end - at))
            if count == 0:
                raise StateError(f"{source.name}: it ends at {at}, but its header promises {header.end} bytes")
            at += count
    now = read_header(source)
    if now is None or (now.sequence, now.state) != (header.sequence, COMPLETE):
        raise StateError(f"snapshot of rank {rank} at step {step} was overwritten while it was copied")
    return target


def copy_path(shm: Path, rank: int, step: int) -> Path:
    """Where a copy is made; it counts once it is published."""
    return shm / f"copies-{step}" / f"snap-{rank}-0{_NEW}"


def publish(made: Sequence[Path]) -> None:
    for path in made:
        os.replace(path, path.with_name(path.name.removesuffix(_NEW)))


def sizes(shm: Path, ranks: Sequence[int], step: int) -> tuple[int, int]:
    """Bytes of the slots of ``step`` in all, and of what is the ranks' own. Raises StateError."""
    found = [_slot(shm, rank, step)[1] for rank in ranks]
    return sum(h.end for h in found), sum(h.own_arrays + h.own_text for h in found)


# giving


def offer(shm: Path, ranks: Collection[int], rank: int, step: int, part: str) -> Offer | None:
    """Where a part of a rank's state of ``step`` lies here, read and found sound; None where it does not. ``ranks``: the node's own."""
    copies = [shm / f"copies-{step}" / f"snap-{rank}-0"] if part == OWN or rank in ranks else []
    # Copies first: a slot is the rank's own to write over while it is read.
    files = [*copies, *(path for _, _, path, header in headers(shm, [rank]) if header.complete and header.step == step)]
    for path in files:
        header = read_header(path)
        if header is not None and header.complete and (header.rank, header.step) == (rank, step) and sound(path, header, part):
            return Offer(str(path.relative_to(shm)), header.pack())
    return None


def read(shm: Path, name: str, at: int, size: int) -> Any:
    """Bytes of an offered file, as an array that travels without being copied. Raises StateError, OSError."""
    import numpy as np

    if not _NAME.fullmatch(name):
        raise StateError(f"{name} is no snapshot")
    with open(shm / name, "rb") as file:
        file.seek(at)
        data = file.read(size)
    if len(data) != size:
        raise StateError(f"{name} has {len(data)} bytes at {at} instead of {size}; it was truncated")
    return np.frombuffer(data, dtype=np.uint8)


# taking


def header_of(given: Offer) -> Header:
    """Raises StateError."""
    header = parse_header(given.header)
    if header is None or not header.sound:
        raise StateError(f"{given.name}: its header was changed on the way")
    return header


def pieces(source: Header, target: Header, part: str) -> list[tuple[int, int, int]]:
    """(offset in the source, offset in the target, bytes) of what must be moved for a part. Raises StateError where the two differ."""
    if _promise(source, part) != _promise(target, part):
        raise StateError(f"its {part} part is not the same, bit for bit")
    found = []
    for here, there in zip(_sections(source, part), _sections(target, part), strict=True):
        size = here.stop - here.start
        found += [(here.start + at, there.start + at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
    return found


def repairable(shm: Path, rank: int, step: int) -> tuple[Path, Header] | None:
    """The slot of ``step`` where its own part is sound, so that only the shared one must be written anew."""
    return next(
        ((path, h) for _, _, path, h in headers(shm, [rank]) if h.complete and h.step == step and sound(path, h, OWN)),
        None,
    )


def take_slot(shm: Path, rank: int, given: Header) -> tuple[Path, Header]:
    """Prepare a slot for a snapshot that is taken over: the one that holds the least. Raises OSError where there is no room."""
    known = list(headers(shm, [rank]))
    same = [path for _, _, path, h in known if h.step == given.step]
    oldest = sorted((h.complete, h.sequence, path) for _, _, path, h in known if not h.pinned)
    path = same[0] if same else oldest[0][2] if oldest else slot_path(shm, rank, 0)
    header = replace(given, pinned=False, sequence=max([h.sequence for _, _, _, h in known if h.sound], default=0) + 1)
    begin(path, header, whole=True)
    return path, header


def begin(path: Path, header: Header, whole: bool) -> None:
    """A file that holds nothing but the header, not COMPLETE. ``whole``: all its memory is found now, else where something is written."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(fd, replace(header, state=WRITING).pack(), 0)
        if whole:
            os.posix_fallocate(fd, 0, header.end)
        else:
            os.ftruncate(fd, header.end)
    finally:
        os.close(fd)


def put(path: Path, at: int, data: Any) -> None:
    """Raises OSError."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def finish(path: Path, header: Header, parts: Sequence[str]) -> bool:
    """Verify what was put and make it COMPLETE; False where it does not hold, and then it stays as it is."""
    if not all(sound(path, header, part) for part in parts):
        return False
    put(path, 0, replace(header, state=COMPLETE).pack())
    return True


def _slot(shm: Path, rank: int, step: int) -> tuple[Path, Header]:
    for _, _, path, header in headers(shm, [rank]):
        if header.complete and header.step == step:
            return path, header
    raise StateError(f"there is no complete snapshot of rank {rank} at step {step} in {shm}")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _sections(header: Header, part: str) -> tuple[slice, slice]:
    return header.shared_sections() if part == SHARED else header.own_sections()


def _promise(header: Header, part: str) -> tuple[int, int, int]:
    """Sizes and checksum of a part."""
    if part == SHARED:
        return header.shared_arrays, header.shared_text, header.shared_xxh3
    return header.own_arrays, header.own_text, header.own_xxh3


def sound(path: Path, header: Header, part: str) -> bool:
    """Whether a part matches the checksum that its header promises."""
    try:
        with mapped(path, header) as data:
            arrays, text = _sections(header, part)
            return checksum(data[arrays], data[text]) == _promise(header, part)[2]
    except (StateError, OSError):
        return False
