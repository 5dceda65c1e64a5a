"""Finding and ending the processes of a group by what they carry, not by who their parent is.

Every process of a group is born with ``KEEPSTEP_GROUP=<job>.<attempt>.<node>`` in its environment, its launcher's at the latest, so /proc
tells them from all others, orphans and daemons included. Strangers are never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

MARK = "KEEPSTEP_GROUP"
CLUSTER_MARK = "KEEPSTEP_CLUSTER"  # on everything that runs in an embedded cluster, so that it can be ended as a whole
SHM_ROOT = "KEEPSTEP_SHM_ROOT"  # set where a cluster has a folder of its own
SHM = Path(os.environ.get(SHM_ROOT, "/dev/shm/keepstep"))  # one folder per node of a group
TMP_ROOT = "KEEPSTEP_TMP_ROOT"  # likewise
TMP = Path(os.environ.get(TMP_ROOT) or f"{tempfile.gettempdir()}/keepstep")  # short: Unix sockets lie in here, their paths have 107 bytes
REMOVE_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36


def of_group(key: str) -> list[int]:
    """Pids of all living processes on this machine of the group ``<job>.<attempt>``, or of one node of it; this process excepted."""
    mark = f"{MARK}={key}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if any(item == mark or item.startswith(mark + b".") for item in file.read().split(b"\0")):
                found.append(int(name))
    return found


def end_group(key: str, wait_s: float = 5.0) -> list[int]:
    """SIGKILL all of them until none is left; returns those that would not go within ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while left := of_group(key) or _second_look(key):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return []


def _second_look(key: str) -> list[int]:
    """In the middle of an exec, and for no longer, a process shows no environment."""
    time.sleep(0.005)
    return of_group(key)


def adopt_orphans() -> frozenset[int]:
    """From now on what loses its parent below this process becomes its child. Returns the children that it has already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return frozenset(children())


def end_orphans(own: Collection[int], wait_s: float = 5.0) -> None:
    """SIGKILL to all children of this process but its ``own``, and to all below them, until none is left: even a cleared environment hides
    nobody."""
    deadline = time.monotonic() + wait_s
    while (orphans := set(children()) - set(own)) and time.monotonic() < deadline:
        for pid in [*orphans, *(p for orphan in orphans for p in below(orphan))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def children() -> list[int]:
    """Of this process, whichever thread of it made them."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children", "rb") as file:
            found += map(int, file.read().split())
    return found


def below(pid: int) -> list[int]:
    """The processes that a living one has made, with all below them, each parent before its children."""
    found: list[int] = []
    left = [pid]
    while left:
        one = left.pop(0)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{one}/task/{task}/children", "rb") as file:
                    left += map(int, file.read().split())
        found.append(one)
    return found[1:]


def os_state(pid: int) -> str | None:
    """R, S, D, T or Z as in /proc; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rsplit(b")", 1)[1].split()[0][0])
    except (OSError, IndexError):
        return None


def remove_folders(key: str) -> None:
    """Remove what the group ``<job>.<attempt>``, or one node of it, holds in shared memory and in temporary files of this machine.

    A file that is made meanwhile keeps its folder from going, so one that is still there is tried again, for REMOVE_S seconds.
    """
    deadline = time.monotonic() + REMOVE_S
    while found := [folder for root in (SHM, TMP) for folder in (root / key, *root.glob(f"{key}.*")) if folder.exists()]:
        for folder in found:
            shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    for root in (SHM, TMP):
        with contextlib.suppress(OSError):
            root.rmdir()


def sweep(key: str) -> list[int]:
    """End the group's processes on this machine and remove its folders; returns pids that would not go."""
    left = end_group(key)
    remove_folders(key)
    return left
