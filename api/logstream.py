"""Sends the logs of a job, whole or as they grow, as text or as server-sent events.

Invariants: every byte that a rank wrote is sent once and in order within its rank (undecodable ones as U+FFFD); memory per stream is
bounded; following reads files only and asks the store about the job at most once a second, so no database session outlives a question;
an event's id is a cursor from which another stream continues.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.adapters.storage.logs import LONGEST_LINE, LogStore, Part, Position, cut
from orchestrator.core.model import Job

POLL_S = 0.2
ASK_S = 1.0  # between two questions about the job
READ_BYTES = 256 * 1024  # per rank and round
TAIL_BYTES = 4 * 1024**2  # per rank
SKIPPED = "[keepstep] older output of this rank was removed by rotation\n"
CURSOR = re.compile(r"a(\d{1,9})\.g(\d{1,9}):((?:\d{1,6}=[A-Za-z0-9]{1,32}\.\d{1,18},?)*)")


@dataclass(frozen=True)
class Wanted:
    """What the client asked for. ``tail``: newest lines per rank; None: from the beginning."""

    rank: int | None = None
    generation: int | None = None
    tail: int | None = None
    follow: bool = False


@dataclass(frozen=True)
class Piece:
    """A line, or a part of a very long one."""

    attempt: int
    generation: int
    rank: int
    text: str
    cursor: str


@dataclass
class Cursor:
    """How far a stream has come: a generation, and a position within each of its ranks."""

    attempt: int
    generation: int
    positions: dict[int, Position] = field(default_factory=dict)

    def __str__(self) -> str:
        places = ",".join(f"{rank}={position.ident}.{position.offset}" for rank, position in self.positions.items())
        return f"a{self.attempt}.g{self.generation}:{places}"


def parse_cursor(text: str) -> Cursor:
    """The inverse of ``str``. Raises ValueError."""
    match = CURSOR.fullmatch(text)
    if match is None:
        raise ValueError("is not an id that this server sent; leave Last-Event-ID out to start anew")
    cursor = Cursor(int(match[1]), int(match[2]))
    for place in filter(None, match[3].split(",")):
        rank, _, rest = place.partition("=")
        ident, _, offset = rest.partition(".")
        cursor.positions[int(rank)] = Position(ident, int(offset))
    return cursor


async def pieces(logs: LogStore, wanted: Wanted, job: Job, ask: Callable[[], Job], since: Cursor | None) -> AsyncIterator[Piece | Job]:
    """All that is ``wanted``, from the newest attempt on (of an earlier one only a generation that is named), and between the pieces
    the job whenever its state or reason has changed or its ranks were started anew.

    Ends when everything was sent and, following, the job is final or a newer generation has taken over from the one that was named.
    """
    attempt, asked_at, settled = job.attempt, time.monotonic(), False
    cursor = since or await asyncio.to_thread(_start, logs, wanted, attempt, wanted.tail)
    yield job
    while True:
        if wanted.follow and not job.state.final and time.monotonic() - asked_at >= ASK_S:
            before, job, asked_at = job, await asyncio.to_thread(ask), time.monotonic()
            if _shown(job) != _shown(before):
                yield job
        final = job.state.final or not wanted.follow
        cursor = cursor or await asyncio.to_thread(_start, logs, wanted, attempt, None)
        ahead = await asyncio.to_thread(_ahead, logs, cursor)
        # Output may still be on its way into the files of a generation that was the newest a moment ago: look at it once more.
        flush = final or settled or len(ahead) > 1
        sent = False
        if cursor is not None:
            async for piece in _round(logs, wanted.rank, cursor, flush):
                sent = True
                yield piece
        if sent:
            continue
        if flush and ahead and wanted.generation is None:
            cursor, settled = Cursor(*ahead[0]), False
        elif final or (flush and ahead):
            return
        else:
            await asyncio.sleep(POLL_S)
            settled = bool(ahead)


def _shown(job: Job) -> tuple[object, ...]:
    return job.state, job.reason, job.attempt, job.generation


async def begun(source: AsyncIterator[Piece | Job]) -> AsyncIterator[Piece | Job]:
    """The same, with the first of it taken already: what cannot even begin is told while an error can still be answered."""
    first = await anext(source)

    async def all_of_it() -> AsyncIterator[Piece | Job]:
        yield first
        async for rest in source:
            yield rest

    return all_of_it()


def _start(logs: LogStore, wanted: Wanted, attempt: int, tail: int | None) -> Cursor | None:
    """Where to begin; None: there is nothing yet. A tail begins in the newest generation that wrote anything."""
    found = logs.generations()
    if wanted.generation is not None:
        chosen = [pair for pair in found if pair[1] == wanted.generation]
    else:
        chosen = [pair for pair in found if pair[0] >= attempt] or [pair for pair in found if pair[0] == found[-1][0]]
    if not chosen or tail is None:
        return Cursor(*chosen[0]) if chosen else None
    for pair in reversed(chosen):
        cursor = Cursor(*pair)
        for rank, parts in _ranks(logs, wanted.rank, cursor).items():
            position = logs.tail(parts, tail, TAIL_BYTES)
            if position is not None:
                cursor.positions[rank] = position
        if cursor.positions:
            return cursor
    return Cursor(*chosen[-1])


def _ahead(logs: LogStore, cursor: Cursor | None) -> list[tuple[int, int]]:
    return [] if cursor is None else [pair for pair in logs.generations() if pair > (cursor.attempt, cursor.generation)]


def _ranks(logs: LogStore, rank: int | None, cursor: Cursor) -> dict[int, list[Part]]:
    ranks = logs.ranks(cursor.attempt, cursor.generation)
    return ranks if rank is None else {found: parts for found, parts in ranks.items() if found == rank}


async def _round(logs: LogStore, rank: int | None, cursor: Cursor, flush: bool) -> AsyncIterator[Piece]:
    """At most READ_BYTES of every rank; moves the cursor with each piece."""
    ranks = await asyncio.to_thread(_ranks, logs, rank, cursor)
    for number, parts in ranks.items():
        chunk = await asyncio.to_thread(logs.read, parts, cursor.positions.get(number), READ_BYTES)
        lines = cut(chunk.data, flush and chunk.at_end)
        if chunk.skipped and lines:
            yield Piece(cursor.attempt, cursor.generation, number, SKIPPED, str(cursor))
        consumed = 0
        for line in lines:
            consumed += len(line)
            cursor.positions[number] = chunk.position(consumed)
            yield Piece(cursor.attempt, cursor.generation, number, line.decode("utf-8", "replace"), str(cursor))


async def as_text(source: AsyncIterator[Piece | Job], prefixed: bool) -> AsyncIterator[bytes]:
    """Text as it was written; ``prefixed``: each line begins with its rank, and pieces of long lines become lines."""
    async for piece in source:
        if isinstance(piece, Job):
            continue
        if prefixed:
            yield f"[rank {piece.rank}] {piece.text.removesuffix(chr(10))}\n".encode()
        else:
            yield piece.text.encode()


async def as_events(source: AsyncIterator[Piece | Job]) -> AsyncIterator[bytes]:
    """Server-sent events: ``log`` for each piece, ``job`` when its state changed, at last ``end`` with the job's state."""
    data: dict[str, Any] = {}
    async for piece in source:
        if isinstance(piece, Job):
            data = {"id": piece.id, "state": piece.state, "reason": piece.reason, "message": piece.message, "generation": piece.generation}
            yield f"event: job\ndata: {json.dumps(data)}\n\n".encode()
        else:
            line = {"attempt": piece.attempt, "generation": piece.generation, "rank": piece.rank, "text": piece.text}
            yield f"event: log\nid: {piece.cursor}\ndata: {json.dumps(line)}\n\n".encode()
    yield f"event: end\ndata: {json.dumps(data)}\n\n".encode()


assert LONGEST_LINE < READ_BYTES  # a round must be able to hold a whole line
