"""A reserve: a fork that waits to become a rank of the next generation, with the memory ready that a rank soon uses.

A fork shares all memory with its launcher, and each page that it first writes, or first reads of a library, costs it a fault and mostly a
copy. A rank takes thousands of them up to its first step: more than half of the time of its start. Which pages these will be is known
from a rank that runs, since both have the launcher's layout. So the reserve takes these faults while nobody waits for it, and holds as
private memory what a rank holds at its start (tens of MB), not a copy of everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import socket
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise(2), Linux 5.14; an older kernel refuses, and the faults come later
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...p \S+ \S+ \d+ *([^\[].*)?$")  # private, and none of the kernel's own like [stack]
# The highest byte of an entry of /proc/<pid>/pagemap: present 0x80, of a file 0x20, mapped by this process only 0x01.
_READ = re.compile(rb"[\xa0\xa1]+")
_WRITTEN = re.compile(rb"\x81+")


def settle(rank: int) -> None:
    """Take the faults of the pages that the process ``rank``, forked from the same launcher, has used so far."""
    madvise = ctypes.CDLL(None).madvise
    with contextlib.suppress(OSError), open(f"/proc/{rank}/pagemap", "rb", buffering=0) as pagemap:  # it may have ended
        for start, end in _mappings():
            pagemap.seek(start // _PAGE * 8)
            pages = pagemap.read((end - start) // _PAGE * 8)[7::8]
            for used, advice in ((_READ, _POPULATE_READ), (_WRITTEN, _POPULATE_WRITE)):
                for run in used.finditer(pages):
                    address, size = start + run.start() * _PAGE, (run.end() - run.start()) * _PAGE
                    madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def _mappings() -> list[tuple[int, int]]:
    """Address ranges of this process's private memory: libraries, heaps and what malloc took."""
    with open("/proc/self/maps") as file:
        found = [_MAPPING.match(line) for line in file]
    return [(int(m[1], 16), int(m[2], 16)) for m in found if m is not None]


def await_order(end: int, message_bytes: int) -> tuple[dict[str, Any], int] | None:
    """Order and log pipe of the rank that this process shall be, from the socket ``end``; None: it is not needed any more."""
    with socket.socket(fileno=end) as link:
        data, fds, _, _ = socket.recv_fds(link, message_bytes, 1)
    return (json.loads(data), fds[0]) if data else None
