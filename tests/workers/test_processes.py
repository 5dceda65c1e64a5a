"""Processes of a group are found and ended by their mark, with orphans and daemons; strangers are never touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers import processes
from workers.processes import MARK, end_group, of_group, os_state, remove_folders, sweep

Start = Callable[[str | None], int]
LONG = "600"


@pytest.fixture
def job() -> str:
    """A name that nothing else on this machine carries."""
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that does nothing, with the mark of a node of a group or without; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def one(mark: str | None) -> int:
        started.append(subprocess.Popen(["sleep", LONG], env={MARK: mark} if mark else {}))
        return asleep(started[-1].pid)

    yield one
    for process in started:
        process.kill()
        process.wait()


def asleep(pid: int) -> int:
    """Waits until the process has become its ``sleep``: in the middle of an exec it shows no environment."""
    while not (Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0") and os_state(pid) == "S"):
        time.sleep(0.001)
    return pid


def reap(*pids: int) -> dict[int, int]:
    """By which signal each of our children ended."""
    return {pid: os.WTERMSIG(os.waitpid(pid, 0)[1]) for pid in pids}


def test_by_group_and_by_node(job: str, start: Start) -> None:
    first, second = start(f"{job}.1.0"), start(f"{job}.1.1")
    assert sorted(of_group(f"{job}.1")) == sorted([first, second])
    assert of_group(f"{job}.1.1") == [second]


def test_a_prefix_of_the_name_is_another_group(job: str, start: Start) -> None:
    tenth, first = start(f"{job}.10.0"), start(f"{job}.1.0")
    eleventh_node = start(f"{job}.1.10")
    assert sorted(of_group(f"{job}.1")) == sorted([first, eleventh_node])
    assert of_group(f"{job}.10") == [tenth]
    assert of_group(f"{job}.1.1") == []
    assert of_group(job[:-1]) == []


def test_strangers_are_not_touched(job: str, start: Start) -> None:
    stranger, other, ours = start(None), start(f"{job}.2.0"), start(f"{job}.1.0")
    assert end_group(f"{job}.1") == []
    assert reap(ours) == {ours: signal.SIGKILL}
    assert [os_state(stranger), os_state(other)] == ["S", "S"]


def test_the_mark_must_be_the_variable(job: str) -> None:
    """Neither an argument nor another variable is a mark."""
    text = f"{MARK}={job}.1.0"
    process = subprocess.Popen(
        ["sh", "-c", f"exec sleep {LONG}", text], env={"NOTE": text, f"X{MARK}": f"{job}.1.0", "PATH": os.environ["PATH"]}
    )
    try:
        asleep(process.pid)
        assert of_group(f"{job}.1") == []
    finally:
        process.kill()
        process.wait()


def test_nothing_to_end(job: str) -> None:
    assert (of_group(f"{job}.1"), end_group(f"{job}.1")) == ([], [])


def test_a_process_that_ended_and_was_not_collected_does_not_count(job: str, start: Start) -> None:
    pid = start(f"{job}.1.0")
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert os_state(pid) == "Z"
    assert of_group(f"{job}.1") == []


def daemon(mark: str) -> int:
    """A process with a session of its own whose parent is gone; it ignores SIGTERM."""
    script = f"trap '' TERM HUP; setsid sh -c 'trap \"\" TERM HUP; echo $$; exec sleep {LONG}' & exit 0"
    env = {MARK: mark, "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        return asleep(int(shell.stdout.readline()))


def test_a_daemon_of_its_own_session_is_ended(job: str) -> None:
    pid = daemon(f"{job}.1.0")
    try:
        assert of_group(f"{job}.1.0") == [pid]
        assert end_group(f"{job}.1.0") == []
        assert os_state(pid) in (None, "Z")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_stopped_process_is_ended(job: str, start: Start) -> None:
    pid = start(f"{job}.1.0")
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert os_state(pid) == "T"
    assert end_group(f"{job}.1") == []
    assert reap(pid) == {pid: signal.SIGKILL}


def test_what_does_not_go_is_named(job: str, start: Start) -> None:
    """As where the kernel holds a process."""
    pid = start(f"{job}.1.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.os, "kill", lambda *_: None)
        left = end_group(f"{job}.1", wait_s=0.02)
    assert left == [pid]


def test_state_of_a_process_that_never_was() -> None:
    assert os_state(2**22 + 1) is None
    assert os_state(os.getpid()) == "R"


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Of shared memory and of temporary files."""
    roots = tmp_path / "shm", tmp_path / "tmp"
    monkeypatch.setattr(processes, "SHM", roots[0])
    monkeypatch.setattr(processes, "TMP", roots[1])
    return roots


def test_folders_go_by_group_or_by_node(roots: tuple[Path, Path], job: str) -> None:
    for root in roots:
        for name in ("1.0", "1.1", "1.10", "10.0", "2.0"):
            (root / f"{job}.{name}").mkdir(parents=True)
            (root / f"{job}.{name}" / "board-0").write_text("")
    remove_folders(f"{job}.1.1")
    for root in roots:
        assert sorted(p.name for p in root.iterdir()) == [f"{job}.{name}" for name in ("1.0", "1.10", "10.0", "2.0")]
    remove_folders(f"{job}.1")
    for root in roots:
        assert sorted(p.name for p in root.iterdir()) == [f"{job}.{name}" for name in ("10.0", "2.0")]


def test_the_root_goes_with_the_last(roots: tuple[Path, Path], job: str) -> None:
    for root in roots:
        (root / f"{job}.1.0").mkdir(parents=True)
    remove_folders(f"{job}.1")
    assert not any(root.exists() for root in roots)
    remove_folders(f"{job}.1")


def test_sweep_ends_and_removes(roots: tuple[Path, Path], job: str, start: Start) -> None:
    pid = start(f"{job}.1.0")
    for root in roots:
        (root / f"{job}.1.0").mkdir(parents=True)
    assert sweep(f"{job}.1") == []
    assert reap(pid) == {pid: signal.SIGKILL}
    assert not any(root.exists() for root in roots)


def test_a_folder_goes_though_files_are_made_in_it_meanwhile(job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As by a thread of the agent that writes when the end comes."""
    monkeypatch.setattr(processes, "SHM", tmp_path / "shm")
    monkeypatch.setattr(processes, "TMP", tmp_path / "tmp")
    folder = tmp_path / "shm" / f"{job}.1.0"
    folder.mkdir(parents=True)

    def write() -> None:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                (folder / str(time.monotonic_ns())).touch()

    thread = threading.Thread(target=write)
    thread.start()
    remove_folders(f"{job}.1")
    thread.join()
    assert not folder.exists()
