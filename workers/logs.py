"""What ranks print: read through pipes by a thread of the agent, stored raw per rank and generation beside the checkpoints.

Invariants: bytes are stored as they came and in their order; the thread only reads, writes and keeps the tail, so a flood costs no
heartbeat; a log has at most two parts of PART_BYTES, the older one beside it as ``.1``, and the number of bytes that went with parts before
them stands at the head of the newest; after ``drain`` all that an ended rank wrote is stored.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CHUNK = 1 << 18
PART_BYTES = 64 << 20
TAIL_BYTES = 8192
TAIL_LINES = 50


def log_name(attempt: int, generation: int, rank: int) -> str:
    """Path below the job's folder."""
    return f"logs/a{attempt}/g{generation}/rank-{rank}.log"


@dataclass
class _Stream:
    fd: int
    file: int
    path: Path
    tail: bytearray = field(default_factory=bytearray)
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: bool = True
    lost: int = 0  # bytes that could not be stored
    stored: int = 0  # bytes in the newest part
    dropped: int = 0  # bytes of parts that were replaced
    heads: list[int] = field(default_factory=lambda: [0, 0])  # our own mark at the head of the older and the newest part, in bytes


class LogPump:
    """Moves bytes from rank pipes to files. ``problem`` is called once per stream that cannot be stored any more."""

    def __init__(self, problem: Callable[[int, str], None]) -> None:
        self._problem = problem
        self._streams: dict[int, _Stream] = {}  # by rank
        self._by_fd: dict[int, tuple[int, _Stream]] = {}
        self._epoll = select.epoll()
        threading.Thread(target=self._run, name="log-pump", daemon=True).start()

    def open(self, rank: int, path: Path) -> int:
        """Start a stream to ``path``; returns the write end for the rank, which the caller must close after the fork."""
        self.close(rank)
        here, there = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(here, False)
        with contextlib.suppress(OSError):  # fewer wake-ups for chatty ranks
            import fcntl

            fcntl.fcntl(here, fcntl.F_SETPIPE_SZ, 1 << 20)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:  # a rank must start even where its log cannot be kept
            self._problem(rank, f"log of rank {rank} cannot be stored at {path}: {error.strerror}; training goes on")
            file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        stream = _Stream(here, file, path)
        self._streams[rank] = stream
        self._by_fd[here] = (rank, stream)
        self._epoll.register(here, select.EPOLLIN)
        return there

    def drain(self, rank: int) -> str:
        """Store what the pipe holds now; returns the last lines as text."""
        stream = self._streams.get(rank)
        if stream is None:
            return ""
        self._move(rank, stream, limit=1 << 22)
        lines = bytes(stream.tail).decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def progress(self, rank: int) -> object:
        """Changes whenever the rank prints."""
        stream = self._streams.get(rank)
        return None if stream is None else (stream.stored, stream.dropped, stream.lost)

    def close(self, rank: int) -> None:
        """Store the rest and end the stream, even if a stray process still holds its other end."""
        stream = self._streams.pop(rank, None)
        if stream is None:
            return
        self._move(rank, stream, limit=1 << 24)
        self._end(stream)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                found = self._by_fd.get(fd)
                if found is not None:
                    self._move(*found, limit=CHUNK)

    def _move(self, rank: int, stream: _Stream, limit: int) -> None:
        with stream.lock:
            moved = 0
            while stream.open and moved < limit:
                try:
                    data = os.read(stream.fd, CHUNK)
                except BlockingIOError:
                    return
                if not data:
                    self._forget(stream)
                    return
                moved += len(data)
                stream.tail += data
                del stream.tail[:-TAIL_BYTES]
                self._store(rank, stream, data)

    def _store(self, rank: int, stream: _Stream, data: bytes) -> None:
        view = memoryview(data)
        try:
            if stream.stored + len(data) > PART_BYTES:
                self._turn(stream)
            while view:
                written = os.write(stream.file, view)
                stream.stored += written
                view = view[written:]
        except OSError as error:
            if not stream.lost:
                self._problem(rank, f"log of rank {rank} cannot be stored at {stream.path}: {error.strerror}; training goes on")
            stream.lost += len(view)

    def _turn(self, stream: _Stream) -> None:
        """The full part becomes the older one, which goes."""
        older = stream.path.with_name(stream.path.name + ".1")
        with contextlib.suppress(FileNotFoundError):
            stream.dropped += older.stat().st_size - stream.heads[0]
        os.replace(stream.path, older)
        os.close(stream.file)
        stream.file = os.open(stream.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        stream.stored = 0
        mark = f"[keepstep: {stream.dropped} bytes dropped here]\n".encode() if stream.dropped else b""
        stream.heads = [stream.heads[1], os.write(stream.file, mark)]

    def _end(self, stream: _Stream) -> None:
        with stream.lock:
            self._forget(stream)
            if stream.file >= 0:
                os.close(stream.file)
                stream.file = -1

    def _forget(self, stream: _Stream) -> None:
        if stream.open:
            stream.open = False
            with contextlib.suppress(OSError):
                self._epoll.unregister(stream.fd)
            self._by_fd.pop(stream.fd, None)
            os.close(stream.fd)
