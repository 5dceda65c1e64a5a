"""What a reserve makes ready of its memory, and what it leaves alone."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from collections.abc import Callable

import pytest

from workers.reserve import settle

PAGES = 500


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def in_fork(work: Callable[[], int]) -> int:
    """What ``work`` gives in a fork of this process."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(there, b"%d\n" % work())
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as answer:
        said = answer.readline()
    os.waitpid(pid, 0)
    return int(said)


@pytest.fixture
def memory() -> mmap.mmap:
    """Written by this process, so that forks share it."""
    made = mmap.mmap(-1, 2 * PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made[:] = b"x" * len(made)
    return made


def touch(memory: mmap.mmap, first: int, pages: int) -> int:
    """Faults of writing one byte into each page."""
    before = faults()
    for n in range(first, first + pages):
        memory[n * mmap.PAGESIZE] = 1
    return faults() - before


def test_pages_that_a_rank_has_written_cost_the_next_no_fault(memory: mmap.mmap) -> None:
    waits, ready = os.pipe()
    rank = os.fork()
    if rank == 0:
        touch(memory, 0, PAGES)
        os.write(ready, b"\n")
        signal.pause()
    os.read(waits, 1)

    def reserve() -> int:
        settle(rank)
        assert memory[0] == ord("x"), "it keeps the launcher's values, not the rank's"
        return touch(memory, 0, PAGES)

    try:
        assert in_fork(lambda: touch(memory, 0, PAGES)) >= PAGES
        assert in_fork(reserve) < PAGES / 10
        assert in_fork(lambda: (settle(rank), touch(memory, PAGES, PAGES))[1]) >= PAGES, "what the rank did not write stays shared"
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        os.close(waits)
        os.close(ready)


def test_a_rank_that_has_ended_is_no_model(memory: mmap.mmap) -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert in_fork(lambda: (settle(gone), touch(memory, 0, PAGES))[1]) >= PAGES
