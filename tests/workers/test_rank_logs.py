"""Logs of ranks: every byte in its order, the tail for verdicts, two parts at most, and a disk that cannot take them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import log_parts, logs
from workers.logs import TAIL_BYTES, TAIL_LINES, LogPump, log_name

Problems = list[tuple[int, str]]


@pytest.fixture
def problems() -> Problems:
    return []


@pytest.fixture
def pump(problems: Problems) -> Iterator[LogPump]:
    made = LogPump(lambda rank, text: problems.append((rank, text)))
    yield made
    for rank in range(4):
        made.close(rank)


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def test_name_below_the_jobs_folder() -> None:
    assert log_name(2, 7, 13) == "logs/a2/g7/rank-13.log"


def test_bytes_are_stored_as_they_came_and_in_their_order(pump: LogPump, tmp_path: Path) -> None:
    """More than the pipe holds, with everything that is no text."""
    path = tmp_path / "logs" / "deep" / "rank-0.log"
    data = b"".join(b"%d \x00\xff\xfe\r\x1b[0m\n" % i for i in range(200_000)) + "ü no newline".encode()
    fd = pump.open(0, path)
    write(fd, data)
    os.close(fd)
    pump.close(0)
    assert pump.settle(20)
    assert path.read_bytes() == data


def test_what_was_drained_is_soon_stored_though_the_pipe_stays_open(pump: LogPump, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    fd = pump.open(0, path)
    for i in range(100):
        write(fd, b"line %d\n" % i)
        pump.drain(0)
        assert pump.settle(20)
        assert path.read_bytes().endswith(b"line %d\n" % i)
    os.close(fd)
    assert path.read_text().split() == [w for i in range(100) for w in ("line", str(i))]


def test_both_streams_of_a_process_keep_their_order(pump: LogPump, tmp_path: Path) -> None:
    fd = pump.open(0, tmp_path / "rank-0.log")
    script = "import os\nfor i in range(500): os.write(1 + i % 2, b'%d\\n' % i)"
    subprocess.run([sys.executable, "-S", "-c", script], stdout=fd, stderr=fd, check=True)
    os.close(fd)
    pump.close(0)
    assert pump.settle(20)
    assert (tmp_path / "rank-0.log").read_text().split() == [str(i) for i in range(500)]


def test_the_tail_is_the_last_lines_as_text(pump: LogPump, tmp_path: Path) -> None:
    fd = pump.open(0, tmp_path / "rank-0.log")
    write(fd, b"".join(b"line %d\n" % i for i in range(5_000)) + b"\xff\nlast words")
    os.close(fd)
    lines = pump.drain(0).splitlines()
    assert (len(lines), lines[-1], lines[-2], lines[0]) == (TAIL_LINES, "last words", "\ufffd", f"line {5_000 - TAIL_LINES + 2}")


def test_the_tail_is_bounded_by_bytes(pump: LogPump, tmp_path: Path) -> None:
    fd = pump.open(0, tmp_path / "rank-0.log")
    write(fd, b"x" * 100_000)
    os.close(fd)
    assert pump.drain(0) == "x" * TAIL_BYTES


def test_the_tail_of_one_rank_is_not_that_of_another(pump: LogPump, tmp_path: Path) -> None:
    ends = [pump.open(rank, tmp_path / f"rank-{rank}.log") for rank in (0, 1)]
    for rank, fd in enumerate(ends):
        write(fd, b"I am %d" % rank)
        os.close(fd)
    assert [pump.drain(0), pump.drain(1), pump.drain(2)] == ["I am 0", "I am 1", ""]


def test_a_new_generation_ends_the_stream_that_a_stray_process_holds(pump: LogPump, tmp_path: Path) -> None:
    old = pump.open(0, tmp_path / "g0.log")
    write(old, b"before")
    new = pump.open(0, tmp_path / "g1.log")
    with pytest.raises(BrokenPipeError):
        os.write(old, b"after")
    write(new, b"fresh")
    os.close(old)
    os.close(new)
    pump.close(0)
    assert pump.settle(20)
    assert [(tmp_path / f"g{i}.log").read_bytes() for i in (0, 1)] == [b"before", b"fresh"]


def test_an_existing_log_is_continued(pump: LogPump, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    for part in (b"one\n", b"two\n"):
        fd = pump.open(0, path)
        write(fd, part)
        os.close(fd)
        pump.close(0)
        assert pump.settle(20)
    assert path.read_bytes() == b"one\ntwo\n"


def parts(path: Path) -> tuple[bytes, bytes | None]:
    older = path.with_name(path.name + ".1")
    return path.read_bytes(), older.read_bytes() if older.exists() else None


def test_a_full_part_becomes_the_older_one(pump: LogPump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_parts, "PART_BYTES", 100)
    path = tmp_path / "rank-0.log"
    fd = pump.open(0, path)
    seen = []
    for letter in (b"a", b"b", b"c", b"d"):
        write(fd, letter * 50)
        pump.drain(0)
        assert pump.settle(20)
        seen.append(parts(path))
    os.close(fd)
    full, other = b"a" * 50 + b"b" * 50, b"c" * 50
    assert seen == [(b"a" * 50, None), (full, None), (other, full), (other + b"d" * 50, full)]


def test_what_goes_with_the_oldest_part_is_said_at_the_head_of_the_newest(
    pump: LogPump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: Problems
) -> None:
    monkeypatch.setattr(log_parts, "PART_BYTES", 100)
    path = tmp_path / "rank-0.log"
    fd = pump.open(0, path)
    for letter in (b"a", b"b", b"c"):
        write(fd, letter * 80)
        pump.drain(0)
        assert pump.settle(20)
    os.close(fd)
    assert parts(path) == (b"[keepstep: 80 bytes dropped here]\n" + b"c" * 80, b"b" * 80)
    assert problems == []


def test_two_parts_are_the_most(pump: LogPump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_parts, "PART_BYTES", 100)
    path = tmp_path / "rank-0.log"
    fd = pump.open(0, path)
    for i in range(50):
        write(fd, b"%04d" % i * 10)
        pump.drain(0)
        assert pump.settle(20)
    os.close(fd)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.log", "rank-0.log.1"]
    newest, older = parts(path)
    assert older is not None
    assert (older + newest).endswith(b"0049" * 10)
    assert len(newest) + len(older) < 300


def test_a_disk_that_takes_nothing_is_told_once_and_training_goes_on(pump: LogPump, problems: Problems, tmp_path: Path) -> None:
    fd = pump.open(0, Path("/dev/full"))
    for _ in range(20):
        write(fd, b"x" * 50_000)
        pump.drain(0)
    write(fd, b"\nlast words")
    os.close(fd)
    assert pump.drain(0).endswith("last words")
    assert pump.settle(20)
    assert problems == [(0, "log of rank 0 cannot be stored at /dev/full: No space left on device; training goes on")]


class Stuck:
    """Storage that takes nothing until ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        write = log_parts.LogParts.write
        monkeypatch.setattr(log_parts.LogParts, "write", lambda parts, data: (self.go.wait(), write(parts, data))[1])


def test_storage_that_hangs_stops_neither_rank_nor_agent_and_the_gap_is_marked(
    pump: LogPump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "QUEUE_BYTES", 1000)
    monkeypatch.setattr(logs, "HUNG_S", 0.1)
    stuck = Stuck(monkeypatch)
    path = tmp_path / "rank-0.log"
    fd = pump.open(0, path)
    lines = [b"%06d\n" % i for i in range(1_000_000)]
    write(fd, b"".join(lines))  # far more than the pipe holds, so it ends only because somebody reads
    os.close(fd)
    assert pump.drain(0).endswith("999999")
    assert not pump.settle(0.1)
    stuck.go.set()
    pump.close(0)
    assert pump.settle(20)
    stored = path.read_bytes()
    kept, left_out = re.sub(GAP, b"", stored), sum(int(n) for n in re.findall(GAP, stored))
    assert len(kept) + left_out == sum(map(len, lines))
    assert left_out > 0
    assert kept.startswith(lines[0])


GAP = rb"\n\[keepstep: storage took nothing, (\d+) bytes left out here\]\n"


def test_a_rank_waits_for_storage_that_is_only_slow(pump: LogPump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "QUEUE_BYTES", 1000)
    stuck = Stuck(monkeypatch)
    path = tmp_path / "rank-0.log"
    fd = pump.open(0, path)
    os.set_blocking(fd, False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += os.write(fd, b"x" * 4096)
    os.set_blocking(fd, True)
    stuck.go.set()
    write(fd, b"y" * logs.PIPE_BYTES)
    os.close(fd)
    pump.close(0)
    assert pump.settle(20)
    assert path.read_bytes() == b"x" * sent + b"y" * logs.PIPE_BYTES


def test_a_part_that_cannot_be_made_costs_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_parts, "PART_BYTES", 100)
    parts = log_parts.LogParts(tmp_path / "rank-0.log")
    parts.write(b"a" * 80)
    (tmp_path / "rank-0.log.new").mkdir()
    with pytest.raises(IsADirectoryError):
        parts.write(b"b" * 80)
    (tmp_path / "rank-0.log.new").rmdir()
    parts.write(b"c" * 80)
    assert [(tmp_path / name).read_bytes() for name in ("rank-0.log.1", "rank-0.log")] == [b"a" * 80, b"c" * 80]
    parts.close()
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    parts.close()
    os.write(other, b"still open")
    os.close(other)
