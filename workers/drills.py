"""Real faults on demand: what a rank prepares for at its start, and what the agent then does to it.

Invariants: a drill is a true fault of its kind, no pretence: a signal, a process that stops, a main thread that never goes on, a kill by
the kernel for memory. Where the real thing cannot be made, the answer says what was done in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from types import FrameType

from workers.memory import memory_folder
from workers.processes import os_state

EXIT_SIGNAL = signal.SIGRTMIN + 1  # its handler is libc's _exit, so the process ends with this number as exit code
HANG_SIGNAL = signal.SIGRTMIN + 2  # its handler is libc's pause: the thread that runs it does not go on
EAT_SIGNAL = signal.SIGRTMIN + 3
NO_MEMORY_SIGNAL = signal.SIGRTMIN + 4
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": EXIT_SIGNAL, "hang": HANG_SIGNAL}
SMALL_BYTES = 64 << 20  # what a rank may still take in the cgroup of the oom drill
ENOUGH_BYTES = 4 * SMALL_BYTES


def arm() -> None:
    """In a rank, before its first line. The C-level handlers work while Python is stuck; those in Python need a running interpreter."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(EXIT_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))
    libc.signal(HANG_SIGNAL, ctypes.cast(libc.pause, ctypes.c_void_p))
    signal.signal(EAT_SIGNAL, _eat)
    signal.signal(NO_MEMORY_SIGNAL, _no_memory)


def inject(fault: str, pid: int, python: bool, found: bool) -> tuple[str, Path | None]:
    """Do it: (a sentence that tells what was done, a cgroup that was made for it).

    ``python``: the rank is a fork of our interpreter; ``found``: a hang of it would be found. Raises ValueError where it would not work.
    """
    if fault in ("exit", "hang", "oom") and os_state(pid) == "T":
        raise ValueError(f"process {pid} is stopped (SIGSTOP) and would not notice; wait until its hang is found, or use kill")
    if fault in ("hang", "stop") and not found:
        raise ValueError("the script reports no steps, so nobody would find its hang; set timeouts.silence_s or call workers.start()")
    if fault in ("hang", "oom") and not python:
        raise ValueError(f"the drill {fault} needs a command of the form [python, script.py, ...] or [python, -m, module, ...]")
    if fault == "oom":
        return _exhaust(pid)
    os.kill(pid, SIGNALS[fault])
    return f"sent signal {int(SIGNALS[fault])} to process {pid}", None


def _exhaust(pid: int) -> tuple[str, Path | None]:
    try:
        folder = _small_cgroup(pid)
    except OSError as error:
        os.kill(pid, NO_MEMORY_SIGNAL)
        return f"no small cgroup can be made for process {pid} here ({error.strerror}); it raises MemoryError instead", None
    os.kill(pid, EAT_SIGNAL)
    return f"process {pid} takes memory in a cgroup of {SMALL_BYTES >> 20} MiB, {folder}, until the kernel kills it", folder


def _small_cgroup(pid: int) -> Path:
    """Below the rank's own. Raises OSError where cgroups cannot be written, or where a parent with processes may have no children."""
    own = memory_folder(pid)
    if own is None:
        raise FileNotFoundError(2, "no memory cgroup is to be seen")
    folder = own / f"keepstep-drill-{pid}"
    folder.mkdir()
    try:
        old = folder / "memory.limit_in_bytes"
        (old if old.exists() else folder / "memory.max").write_text(str(SMALL_BYTES))
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
    return folder


def remove_cgroup(folder: Path | None) -> None:
    """After the rank's end; as long as something lives in it, it stays."""
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _eat(number: int, frame: FrameType | None) -> None:
    held = []
    for _ in range(ENOUGH_BYTES >> 20):
        held.append(bytearray(b"x" * (1 << 20)))
    raise MemoryError(f"drill oom: {ENOUGH_BYTES >> 20} MiB were taken and the kernel did not mind")


def _no_memory(number: int, frame: FrameType | None) -> None:
    raise MemoryError("drill oom")
