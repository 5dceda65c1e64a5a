"""Damage on request: what the drill ``corrupt_checkpoint`` does. The damage is real, and only a checksum can notice it."""

from __future__ import annotations

from pathlib import Path

from workers.checkpoint.catalog import files_of
from workers.checkpoint.storage import LocalFolder, open_folder


def change_a_byte(url: str) -> str:
    """Change one byte in the middle of the largest file of a checkpoint; tells which. Doing it again does not undo it. Raises StateError,
    OSError."""
    folder = open_folder(url)
    largest = max(files_of(url), key=lambda file: file.bytes, default=None)
    if largest is None:
        raise FileNotFoundError(f"{url} has no file of arrays that could be damaged")
    at = largest.bytes // 2
    if isinstance(folder, LocalFolder):
        with open(Path(folder.url) / largest.name, "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([(byte + 1) % 256]))
    else:  # an object can only be put anew
        data = bytearray(b"".join(folder.read(largest.name)))
        data[at] = (data[at] + 1) % 256
        folder.write(largest.name, [bytes(data)])
    return f"byte {at} of {largest.name} in {url} was changed"
