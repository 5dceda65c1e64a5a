"""Python stacks of a rank and of the processes below it, taken from outside by py-spy, which stops none of them.

It reads the memory of a process, so it works where the process is stopped, holds the GIL or is stuck in C. Invariant: whatever happens, the
answer is there within TAKE_S, empty where a stack could not be had; the reason stands in its text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.messages import ProcessStack, RankStacks
from workers.processes import below, os_state

TAKE_S = 1.5
AT_ONCE = 16
CHILDREN = 32  # of one rank
# Frames of ours below every script, and those of the interpreter that ran it.
_BELOW = ("workers/launcher.py", "workers/rank.py", "<frozen runpy>")
_LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", "<frozen")


def take(pids: dict[int, int]) -> tuple[RankStacks, ...]:
    """``pids``: process of each rank. Of the processes below a rank the first ``CHILDREN`` are looked at."""
    until = time.monotonic() + TAKE_S
    trees = {rank: [pid, *below(pid)[:CHILDREN]] for rank, pid in pids.items()}
    everyone = [pid for tree in trees.values() for pid in tree]
    with ThreadPoolExecutor(max(1, min(AT_ONCE, len(everyone)))) as pool:
        told = dict(zip(everyone, pool.map(lambda pid: _dump(pid, until), everyone), strict=True))
    return tuple(_of_rank(rank, {pid: told[pid] for pid in tree}) for rank, tree in trees.items())


Threads = list[dict[str, Any]]


def _dump(pid: int, until: float) -> tuple[Threads, str]:
    """Threads as py-spy tells them, or why there are none. Its JSON tells of one process only, so it is asked for each."""
    spy = Path(sys.executable).with_name("py-spy")
    command = [str(spy), "dump", "--nonblocking", "--json", "--full-filenames", "--pid", str(pid)]
    try:
        left = max(0.0, until - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False, stdin=subprocess.DEVNULL)
        threads: Threads = json.loads(done.stdout) if done.stdout.strip() else []
        return threads, "" if threads else done.stderr.strip()[:300] or "it is no Python process"
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return [], f"{type(error).__name__}: {error}"


def _of_rank(rank: int, told: dict[int, tuple[Threads, str]]) -> RankStacks:
    own, *children = (_process(pid, threads) for pid, (threads, _) in told.items())
    text = "\n".join(_text(pid, threads, problem) for pid, (threads, problem) in told.items())
    return RankStacks(rank, own, tuple(children), text)


def _process(pid: int, threads: Threads) -> ProcessStack:
    main = next((t for t in threads if t["os_thread_id"] == pid), threads[0] if threads else None)
    frames = _frames(main) if main is not None else []
    own = next((f for f in frames if not any(part in f["filename"] for part in _LIBRARIES)), None)
    return ProcessStack(pid, os_state(pid), tuple(map(_line, frames)), _line(own) if own is not None else None)


def _frames(thread: dict[str, Any]) -> list[dict[str, Any]]:
    """Innermost first, without what lies below the script."""
    return [f for f in thread["frames"] if not f["filename"].endswith(_BELOW)]


def _line(frame: dict[str, Any]) -> str:
    return f"{frame['name']} ({_short(frame['filename'])}:{frame['line']})"


def _short(filename: str) -> str:
    """From the package on, where it is one of a library."""
    for mark in ("site-packages/", "dist-packages/"):
        if mark in filename:
            return filename.split(mark, 1)[1]
    parts = filename.split(f"{os.sep}lib{os.sep}python", 1)
    if len(parts) == 2:
        return parts[1].split(os.sep, 1)[-1]
    package = Path(__file__).parent
    return (
        f"{package.name}/{Path(filename).relative_to(package)}" if filename.startswith(f"{package}{os.sep}") else os.path.basename(filename)
    )


def _text(pid: int, threads: Threads, problem: str) -> str:
    lines = [f"process {pid} ({os_state(pid) or 'gone'}){f': no Python stack: {problem}' if problem else ''}"]
    for thread in sorted(threads, key=lambda t: t["os_thread_id"] != pid):
        name = "main thread" if thread["os_thread_id"] == pid else f"thread {thread['thread_name'] or ''}".rstrip()
        lines.append(f"  {name}{', holds the GIL' if thread['owns_gil'] else ''}")
        lines += [f"    {_line(f)}" for f in _frames(thread)]
    return "\n".join(lines)
