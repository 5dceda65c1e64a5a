"""What real ranks leave as evidence: kernel kills for memory, full disks, stacks from outside, silence; and the verdict that it gives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.ranked import ranked
from workers.cgroups import ROOT
from workers.disks import full
from workers.hangs import judge_hang
from workers.messages import FailureClass, LaunchOrder, RankStacks, RestoreOrder, Source
from workers.signs import cpu_seconds
from workers.stacks import take
from workers.verdict import Verdict, judge

EATS = """
import os, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
held = []
while True:
    held.append(bytearray(b"x" * (1 << 20)))
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup of 120 MB that this test may put processes into."""
    folder = next((root for root in (ROOT / "memory", ROOT) if (root / "cgroup.procs").exists()), ROOT)
    folder = folder / f"keepstep-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if (folder / "memory.limit_in_bytes").exists() else "memory.max")
        limit.write_text(str(120 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"memory cgroups cannot be made here: {error}")
    yield folder
    with contextlib.suppress(OSError):
        folder.rmdir()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the kernel kills for other tests at the same time does not count."""
    monkeypatch.setattr("workers.memory.VMSTAT", tmp_path / "vmstat")


def verdict_of(reports: object) -> Verdict:
    found = judge(tuple(reports))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_kill_by_the_kernel_for_memory_is_told_from_any_other(tmp_path: Path, small_cgroup: Path) -> None:
    async def run() -> Verdict:
        async with ranked(tmp_path, EATS) as one:
            (small_cgroup / "cgroup.procs").write_text(str(one.ranks.pids()[0]))
            await one.until(lambda: one.cgroup(0) == small_cgroup)
            (one.work / "go").touch()
            return verdict_of(await one.all_ended())

    verdict = asyncio.run(run())
    assert (verdict.kind, verdict.cause, verdict.rank, verdict.signal) == (FailureClass.OUT_OF_MEMORY, "oom_killed", 0, signal.SIGKILL)
    assert "its memory limit is 120 MiB" in verdict.evidence


def test_a_sigkill_from_elsewhere_in_that_cgroup_is_a_signal(tmp_path: Path, small_cgroup: Path) -> None:
    async def run() -> Verdict:
        async with ranked(tmp_path, EATS) as one:
            pid = one.ranks.pids()[0]
            (small_cgroup / "cgroup.procs").write_text(str(pid))
            await one.until(lambda: one.cgroup(0) == small_cgroup)
            os.kill(pid, signal.SIGKILL)
            return verdict_of(await one.all_ended())

    verdict = asyncio.run(run())
    assert (verdict.kind, verdict.cause) == (FailureClass.INFRASTRUCTURE, "signal")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, mounted for a process that ends when its input does: nothing is left, however the tests end."""
    mount = f"mount -t tmpfs -o size=4m,nr_inodes=64 none '{tmp_path}' && echo mounted && exec cat"
    pipe = subprocess.PIPE
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", mount], stdin=pipe, stdout=pipe, stderr=pipe) as holder:
        said = holder.stdout.readline() if holder.stdout else b""
        if said != b"mounted\n":
            pytest.skip(f"no file system can be mounted here: {holder.stderr.read().decode().strip() if holder.stderr else said}")
        yield Path(f"/proc/{holder.pid}/root{tmp_path}")


FILLS = {
    "by an error that names it": "open('big', 'wb').write(b'x' * (8 << 20))",
    "by an error that does not": "f = open('big', 'wb', 0)\nwhile f.write(b'x' * 65536) == 65536: pass\nraise RuntimeError('bad pos')",
    "by an exit code": "import os\ntry: open('big', 'wb').write(b'x' * (8 << 20))\nexcept OSError: os._exit(4)",
    "by too many files": "for n in range(99): open(f'f{n}', 'w')",
}


@pytest.mark.parametrize("how", FILLS)
def test_a_full_disk_has_a_class_of_its_own(tmp_path: Path, small_disk: Path, how: str) -> None:
    async def run() -> Verdict:
        async with ranked(tmp_path, f"import os\nos.chdir({str(small_disk)!r})\n{FILLS[how]}\n", env={"TMPDIR": str(small_disk)}) as one:
            return verdict_of(await one.all_ended())

    verdict = asyncio.run(run())
    assert (verdict.kind, verdict.cause) == (FailureClass.DISK_FULL, "disk_full"), verdict.evidence
    assert str(small_disk) in verdict.evidence


def test_a_full_disk_beside_an_error_of_the_program_is_a_coincidence(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "big").write_bytes(b"x" * (4 << 20))
    assert full([str(small_disk)]) == f"{small_disk} has 0 bytes free of {4 << 20}"

    async def run() -> Verdict:
        async with ranked(tmp_path, "{}['x']\n", env={"TMPDIR": str(small_disk)}) as one:
            return verdict_of(await one.all_ended())

    assert asyncio.run(run()).kind == FailureClass.USER


def test_folders_with_room_and_folders_that_are_gone_are_not_full(tmp_path: Path) -> None:
    assert full([str(tmp_path), str(tmp_path / "gone")]) is None


def test_a_removed_working_directory_is_not_the_programs_fault(tmp_path: Path) -> None:
    async def run() -> Verdict:
        async with ranked(tmp_path, "import time; time.sleep(60)") as one:
            await one.ranks.stop(0)
            (one.work / "case.py").unlink()
            one.work.rmdir()
            one.ranks.launch(LaunchOrder(1, RestoreOrder(Source.NONE, 0), 1, "127.0.0.1", 1, False), None)
            return verdict_of(await one.all_ended())

    verdict = asyncio.run(run())
    assert (verdict.kind, verdict.cause, verdict.exit_code) == (FailureClass.INFRASTRUCTURE, "cannot_start", 125)
    assert "nothing of the script ran yet" in verdict.evidence


STUCK = """
import os, re, signal, sys, time
import multiprocessing

def read_sample():
    time.sleep(600)

def stuck():
    how = os.environ["RANK"]
    if how == "0":
        read_sample()
    if how == "1":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if how == "2":
        multiprocessing.get_context("fork").Process(target=read_sample).start()
        print("up", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

print("up", flush=True)
stuck()
"""


def test_stacks_are_taken_from_sleeping_busy_and_stopped_processes_and_their_children(tmp_path: Path) -> None:
    async def run() -> tuple[RankStacks, ...]:
        async with ranked(tmp_path, STUCK, ranks=3) as one:
            await one.until(lambda: all("up" in one.log(n) for n in range(3)))
            await one.until(lambda: one.ranks.reports()[2].os_state == "T")
            for _ in range(50):  # until each has come to the place where it stays
                found = await asyncio.to_thread(take, one.ranks.pids())
                asleep, busy, stopped = found
                children = [frame for child in stopped.children for frame in child.frames[:1]]
                if "read_sample" in f"{asleep.own.place}" and "stuck" in f"{busy.own.place}" and "read_sample" in f"{children}":
                    return found
            raise AssertionError(found)

    asleep, busy, stopped = asyncio.run(run())
    assert asleep.own.frames[0].startswith("read_sample (case.py:")
    assert "stuck (case.py:" in asleep.own.frames[1]
    assert not any("launcher" in frame or "runpy" in frame for frame in asleep.own.frames)
    assert busy.own.place is not None
    assert busy.own.place.startswith("stuck (case.py:")
    assert "holds the GIL" in busy.text
    assert (stopped.own.os_state, len(stopped.children)) == ("T", 1)
    assert stopped.children[0].frames[0].startswith("read_sample (case.py:")
    assert f"process {stopped.children[0].pid} (S)" in stopped.text


def test_a_process_that_is_gone_or_no_python_has_no_stack_and_says_why() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        (other,) = take({3: process.pid})
        process.kill()
    (gone,) = take({4: process.pid})
    for found in (other, gone):
        assert found.own.frames == ()
        assert "no Python stack: " in found.text


def test_a_dump_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 60\n")
    spy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("workers.stacks.TAKE_S", 0.2)
    (found,) = take({0: os.getpid()})
    assert "TimeoutExpired" in found.text


GLOO = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=int(os.environ["RANK"]), world_size=2)

def augment():
    print("stuck", flush=True)
    time.sleep(600)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
if dist.get_rank() == 1:
    augment()
print("waits", flush=True)
model(torch.zeros(2, 4)).sum().backward()
"""


def test_the_rank_outside_of_a_real_collective_is_blamed(tmp_path: Path) -> None:
    async def run() -> Verdict:
        async with ranked(tmp_path, GLOO, ranks=2) as one:
            await one.until(lambda: "waits" in one.log(0) and "stuck" in one.log(1))
            for _ in range(100):
                found = {s.rank: s for s in await asyncio.to_thread(take, one.ranks.pids())}
                verdict = judge_hang(one.ranks.reports(), found, "silent", 0.0)
                if verdict.rank is not None:  # rank 0 has come to the collective
                    return verdict
            raise AssertionError(found)

    verdict = asyncio.run(run())
    assert verdict.rank == 1
    assert "it is not in the collective but in augment (case.py:" in verdict.evidence
    assert verdict.signature.startswith("hang at augment (case.py:")
    assert set(verdict.stacks) == {0, 1}


QUIET = """
import os, threading, time
print("up", flush=True)
while not os.path.exists("go"):
    sum(range(10_000))
threading.Event().wait()
"""


def test_output_and_cpu_time_are_signs_of_life_of_a_script_without_steps(tmp_path: Path) -> None:
    async def run() -> None:
        async with ranked(tmp_path, QUIET, silence_s=60.0) as one:
            # Two seconds of CPU time take two seconds at least, so without them it would have been quiet for longer.
            await one.until(lambda: cpu_seconds(one.ranks.pids()[0]) > 2.0 and one.ranks.quiet()[0] < 2.0)
            (one.work / "go").touch()
            await one.until(lambda: one.ranks.quiet()[0] > 2.5)

    asyncio.run(run())


def test_without_the_option_nobody_looks(tmp_path: Path) -> None:
    async def run() -> dict[int, float]:
        async with ranked(tmp_path, "import time; time.sleep(60)") as one:
            return one.ranks.quiet()

    assert asyncio.run(run()) == {}


LOOPS = """
import os, time
if os.environ["KEEPSTEP_RANK"] == "1":
    import signal
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    print("up", flush=True)
    time.sleep(0.05)
"""


def drilled(home: Path, fault: str, **changes: object) -> tuple[str, Verdict]:
    """What the drill said, and the verdict over what it did to a rank."""

    async def run() -> tuple[str, Verdict]:
        async with ranked(home, LOOPS, silence_s=60.0, **changes) as one:
            await one.until(lambda: "up" in one.log(0))
            said = one.ranks.drill(fault, 0)
            return said, verdict_of(await one.all_ended())

    return asyncio.run(run())


def test_the_oom_drill_is_a_true_kill_by_the_kernel(tmp_path: Path, small_cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.memory.VMSTAT", Path("/proc/vmstat"))  # the kill may come before the new cgroup was seen
    said, verdict = drilled(tmp_path, "oom")
    assert "takes memory in a cgroup of 64 MiB" in said
    assert (verdict.kind, verdict.cause, verdict.signal, verdict.drill) == (FailureClass.OUT_OF_MEMORY, "oom_killed", 9, "oom")
    folder = re.search(r"64 MiB, (\S+),", said)
    assert folder is not None
    assert not Path(folder[1]).exists(), "its cgroup goes with it"


def test_the_oom_drill_says_so_where_it_cannot_have_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cgroups.ROOT", tmp_path / "none")
    said, verdict = drilled(tmp_path, "oom")
    assert "it raises MemoryError instead" in said
    assert (verdict.kind, verdict.cause, verdict.drill) == (FailureClass.OUT_OF_MEMORY, "exception", "oom")


def test_the_exit_drill_is_a_true_exit(tmp_path: Path) -> None:
    _, verdict = drilled(tmp_path, "exit")
    assert (verdict.kind, verdict.exit_code, verdict.drill) == (FailureClass.INFRASTRUCTURE, 35, "exit")


def test_the_hang_drill_pauses_a_process_that_still_lives(tmp_path: Path) -> None:
    async def run() -> None:
        async with ranked(tmp_path, LOOPS, silence_s=60.0) as one:
            await one.until(lambda: "up" in one.log(0))
            one.ranks.drill("hang", 0)
            await one.until(lambda: one.ranks.quiet()[0] > 1.5)
            (found,) = await asyncio.to_thread(take, one.ranks.pids())
            assert found.own.os_state == "S"
            verdict = judge_hang(one.ranks.reports(), {0: found}, "silent", 0.0)
            assert (verdict.rank, verdict.kind, verdict.drill) == (0, FailureClass.INFRASTRUCTURE, "hang")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "rank", "changes", "reason"),
    [
        ("exit", 1, {"silence_s": 60.0}, "is stopped"),
        ("hang", 1, {"silence_s": 60.0}, "is stopped"),
        ("oom", 1, {"silence_s": 60.0}, "is stopped"),
        ("hang", 0, {}, "nobody would find its hang"),
        ("stop", 0, {}, "nobody would find its hang"),
        ("oom", 0, {"command": ("sh", "-c", "echo up; exec sleep 60")}, "needs a command of the form"),
        ("kill", 7, {}, "does not run"),
    ],
)
def test_a_drill_that_would_not_work_is_refused_and_leaves_no_mark(
    tmp_path: Path, fault: str, rank: int, changes: dict[str, object], reason: str
) -> None:
    async def run() -> None:
        async with ranked(tmp_path, LOOPS, ranks=2, **changes) as one:
            await one.until(lambda: "up" in one.log(0) and "up" in one.log(1))
            await one.until(lambda: one.ranks.reports()[1].os_state in ("T", None) or "command" in changes)
            with pytest.raises(ValueError, match=reason):
                one.ranks.drill(fault, rank)
            assert [r.drill for r in one.ranks.reports()] == [None, None]

    asyncio.run(run())
