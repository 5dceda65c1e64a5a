"""What a checkpoint in storage looks like. PURE.

``<storage>/checkpoints/step-<12 digits>.a<attempt>.g<generation>/`` with ``shared-<node>.safetensors`` (that node's part of the arrays
that all ranks share), ``rank-<r>.safetensors`` (a rank's own arrays, where it has any) and ``manifest.json``, written last. A folder
without a manifest is no checkpoint. The manifest carries its own checksum. Newest is the one of the newest attempt, generation and step, in
that order: what a fenced attempt still commits never comes before what a later one wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from workers.checkpoint.tree import StateError, unflatten

FORMAT = 1
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
COMMITTED = "committed"  # beside the folders: written once, after the first manifest
PINNED = "pinned"  # in a checkpoint's folder: retention leaves it alone

_NAME = re.compile(r"step-(\d{12})\.a(\d+)\.g(\d+)")


class Unsuited(StateError):
    """A sound checkpoint, but not for this version or this number of ranks."""


@dataclass(frozen=True)
class FileEntry:
    """``xxh3`` in hex, 16 digits."""

    name: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Tree:
    """A skeleton with the table of its arrays, as in checkpoint.tree: rows of [path, kind, dtype, shape, bytes]."""

    skeleton: Any
    leaves: list[list[Any]]


@dataclass(frozen=True)
class Share:
    """What one node wrote. JSON values only. ``own`` by rank as text, because JSON has no other keys; ``where``: array -> file name."""

    node_index: int
    ranks: list[int]
    files: list[FileEntry]
    shared: Tree
    own: dict[str, Tree]
    where: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class Manifest:
    """Times in Unix seconds."""

    job_id: str
    attempt: int
    generation: int
    step: int
    world_size: int
    nodes: list[list[int]]  # the ranks of each node
    started_at: float
    committed_at: float
    files: list[FileEntry]
    shared: Tree
    own: dict[str, Tree]
    where: dict[str, str]
    finite: bool = True  # no rank's metrics had been NaN or infinite for some time when it was taken
    format: int = FORMAT


def folder_name(step: int, attempt: int, generation: int) -> str:
    return f"step-{step:012d}.a{attempt}.g{generation}"


def parse_name(name: str) -> tuple[int, int, int] | None:
    """(step, attempt, generation), None for a foreign folder."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def age_key(step: int, attempt: int, generation: int) -> tuple[int, int, int]:
    """Sorts oldest first."""
    return attempt, generation, step


def shared_file(node_index: int) -> str:
    return f"shared-{node_index}.safetensors"


def rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def merge(shares: Sequence[Share], world_size: int) -> tuple[Tree, dict[str, Tree], dict[str, str], list[FileEntry]]:
    """(shared, own, where, files) of all nodes. Raises StateError where a rank or an array is missing or the nodes disagree."""
    ordered = sorted(shares, key=lambda s: s.node_index)
    ranks = sorted(rank for share in ordered for rank in share.ranks)
    if ranks != list(range(world_size)):
        raise StateError(f"the shares cover ranks {ranks}, the group has {world_size}")
    shared = ordered[0].shared
    for share in ordered[1:]:
        if share.shared != shared:
            raise StateError(f"nodes 0 and {share.node_index} differ in a part that must be equal on all ranks")
    own = {key: tree for share in ordered for key, tree in share.own.items()}
    where = {key: name for share in ordered for key, name in share.where.items()}
    missing = [row[0] for row in shared.leaves if row[0] not in where]
    if missing:
        raise StateError(f"{len(missing)} shared arrays are in no file, the first is {missing[0]}")
    return shared, own, where, [file for share in ordered for file in share.files]


def is_finite(own: dict[str, Tree]) -> bool:
    """What the ranks noted of their metrics in their own part."""
    noted = [unflatten(tree.skeleton, [None] * len(tree.leaves)) for tree in own.values()]
    return not any(isinstance(part, dict) and part.get("nonfinite_since") for part in noted)


def manifest_bytes(manifest: Manifest) -> bytes:
    body = _canonical(asdict(manifest))
    return b'{"xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'","manifest":' + body + b"}\n"


def parse_manifest(data: bytes) -> Manifest:
    """Raises StateError, which says whether it is damaged or of a newer format."""
    try:
        outer = json.loads(data)
        body = outer["manifest"]
        if body["format"] > FORMAT:
            raise Unsuited(f"the manifest has format {body['format']}, this version reads up to {FORMAT}; use a newer KeepStep")
        if xxhash.xxh3_64_hexdigest(_canonical(body)) != outer["xxh3"]:
            raise StateError("the manifest does not match its checksum, its bytes were changed")
        fields = dict(body)
        fields["files"] = [FileEntry(**entry) for entry in body["files"]]
        fields["shared"] = Tree(**body["shared"])
        fields["own"] = {rank: Tree(**tree) for rank, tree in body["own"].items()}
        return Manifest(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"the manifest is unreadable: {type(error).__name__}: {error}") from error


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
