"""What ranks print: read through pipes by one thread of the agent, stored by another, raw per rank and generation beside the checkpoints.

Invariants: bytes are stored as they came and in their order; neither a flood nor storage that does not answer costs a heartbeat, since
only the second thread touches storage; a rank waits for slow storage once QUEUE_BYTES of its output do, but not for storage that takes
nothing for HUNG_S seconds: then output is left out, and its place and size are marked; the last lines are known without storage.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from workers.log_parts import LogParts

CHUNK = 1 << 18
PIPE_BYTES = 1 << 20
QUEUE_BYTES = 8 << 20  # of a rank, read and not yet stored
HUNG_S = 5.0
FULL_PAUSE_S = 0.005  # between two looks at a pipe whose queue is full
TAIL_BYTES = 8192
TAIL_LINES = 50


def log_name(attempt: int, generation: int, rank: int) -> str:
    """Path below the job's folder."""
    return f"logs/a{attempt}/g{generation}/rank-{rank}.log"


@dataclass(eq=False)
class _Stream:
    """``lock`` guards the pipe and the queue; ``parts`` belongs to the thread that stores."""

    rank: int
    fd: int
    path: Path
    parts: LogParts
    lock: threading.Lock = field(default_factory=threading.Lock)
    tail: bytearray = field(default_factory=bytearray)
    queue: deque[bytes] = field(default_factory=deque)
    held: int = 0  # bytes in the queue or on their way into storage
    left_out: int = 0  # bytes since those in the queue
    read: int = 0  # bytes in all
    open: bool = True
    told: bool = False  # that it cannot be stored


class LogPump:
    """Moves bytes from rank pipes to files. ``problem`` is called once per stream that cannot be stored."""

    def __init__(self, problem: Callable[[int, str], None]) -> None:
        self._problem = problem
        self._streams: dict[int, _Stream] = {}  # by rank
        self._by_fd: dict[int, _Stream] = {}
        self._unstored: set[_Stream] = set()
        self._writing_since: float | None = None
        self._work = threading.Event()
        self._epoll = select.epoll()
        for run in (self._read_all, self._store_all):
            threading.Thread(target=run, name=f"log{run.__name__}", daemon=True).start()

    def open(self, rank: int, path: Path) -> int:
        """Start a stream to ``path``; returns the write end for the rank, which the caller must close after the fork."""
        self.close(rank)
        here, there = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(here, False)
        with contextlib.suppress(OSError):  # fewer wake-ups for chatty ranks
            fcntl.fcntl(here, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        stream = _Stream(rank, here, path, LogParts(path))
        stream.queue.append(b"")  # makes the file: a rank that says nothing has a log too
        self._streams[rank] = self._by_fd[here] = stream
        self._pass_on(stream)
        self._epoll.register(here, select.EPOLLIN)
        return there

    def drain(self, rank: int) -> str:
        """Read what the pipe holds now; returns the last lines as text."""
        stream = self._streams.get(rank)
        if stream is None:
            return ""
        self._move(stream, 4 * PIPE_BYTES, QUEUE_BYTES + PIPE_BYTES)
        lines = bytes(stream.tail).decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def progress(self, rank: int) -> object:
        """Changes whenever the rank prints."""
        stream = self._streams.get(rank)
        return None if stream is None else stream.read

    def close(self, rank: int) -> None:
        """Read the rest and end the stream, even if a stray process still holds its other end."""
        stream = self._streams.pop(rank, None)
        if stream is None:
            return
        self._move(stream, 16 * PIPE_BYTES, QUEUE_BYTES + 16 * PIPE_BYTES)
        with stream.lock:
            self._forget(stream)
        self._pass_on(stream)

    def settle(self, seconds: float) -> bool:
        """Wait until all that was read is stored, or given up; False: it was not within this time."""
        deadline = time.monotonic() + seconds
        while any(s.held or s.queue or not s.open for s in list(self._unstored)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    # the thread that reads

    def _read_all(self) -> None:
        while True:
            streams = [self._by_fd.get(fd) for fd, _ in self._epoll.poll()]
            moved = [self._move(stream, CHUNK, QUEUE_BYTES) for stream in streams if stream is not None]
            if not all(moved):
                time.sleep(FULL_PAUSE_S)

    def _move(self, stream: _Stream, limit: int, room: int) -> bool:
        """From the pipe into the queue, up to ``limit`` bytes; False: the queue holds ``room`` bytes and storage may soon take them."""
        with stream.lock:
            moved = 0
            while stream.open and moved < limit:
                full = stream.held >= room
                if full and not self._hangs():
                    return False
                try:
                    data = os.read(stream.fd, CHUNK)
                except BlockingIOError:
                    break
                if not data:
                    self._forget(stream)
                    break
                moved += len(data)
                stream.read += len(data)
                stream.tail += data
                del stream.tail[:-TAIL_BYTES]
                if full:
                    stream.left_out += len(data)
                else:
                    self._queue(stream, data)
        self._pass_on(stream)
        return True

    def _hangs(self) -> bool:
        since = self._writing_since
        return since is not None and time.monotonic() - since > HUNG_S

    def _queue(self, stream: _Stream, data: bytes) -> None:
        if stream.left_out:
            data = f"\n[keepstep: storage took nothing, {stream.left_out} bytes left out here]\n".encode() + data
            stream.left_out = 0
        stream.queue.append(data)
        stream.held += len(data)

    def _forget(self, stream: _Stream) -> None:
        if stream.open:
            stream.open = False
            if stream.left_out:
                self._queue(stream, b"")
            with contextlib.suppress(OSError):
                self._epoll.unregister(stream.fd)
            self._by_fd.pop(stream.fd, None)
            os.close(stream.fd)

    def _pass_on(self, stream: _Stream) -> None:
        self._unstored.add(stream)
        self._work.set()

    # the thread that stores

    def _store_all(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            for stream in list(self._unstored):
                while stream.queue:
                    self._store(stream)
                with stream.lock:
                    if not stream.queue:
                        self._unstored.discard(stream)
                        if not stream.open:
                            stream.parts.close()

    def _store(self, stream: _Stream) -> None:
        data = stream.queue.popleft()
        self._writing_since = time.monotonic()
        try:
            stream.parts.write(data)
        except OSError as error:
            if not stream.told:
                stream.told = True
                why = f"log of rank {stream.rank} cannot be stored at {stream.path}: {error.strerror}; training goes on"
                self._problem(stream.rank, why)
        finally:
            self._writing_since = None
            with stream.lock:
                stream.held -= len(data)
