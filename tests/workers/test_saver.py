"""Checkpoints of real ranks by real agents: committed, tried, kept, and what becomes of them when storage fails, hangs or is taken over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers.led import SCRIPT, Led, led, led_spec
from workers import pacing, saving
from workers.checkpoint.catalog import catalog, pin, verify
from workers.checkpoint.damage import change_a_byte
from workers.checkpoint.format import FOLDER, folder_name
from workers.checkpoint.lease import Lease, claim, read_lease
from workers.listing import read_catalog
from workers.messages import RestoreOrder, Source


def parts(storage: Path) -> list[str]:
    return [str(p) for p in storage.rglob("*.part")]


def test_a_checkpoint_is_committed_tried_and_checked(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path, nodes=2, every_steps=20, keep_last=2)) as group:
            await group.launch()
            await group.until(lambda: len(group.group.checkpoints) >= 4 and group.group.pruned)
            (tried,) = group.heard("RestoreTested")
            assert tried.startswith("step 20: read back in ")
            assert tried.endswith("bit for bit the snapshot")
            assert group.group.checks
            assert {c.problem for c in group.group.checks} == {None}
            assert 2 <= len(catalog(str(tmp_path))) <= 4
            assert not list(group.agents[0].shm.glob("*trial*/*"))
            assert not group.group.damaged
            assert group.saver.progress is None
            assert read_lease(str(tmp_path)) == Lease(group.spec.job_id, 1, 0)

    asyncio.run(run())


def test_a_pinned_one_outlives_retention(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path, every_steps=10, keep_last=2)) as group:
            await group.launch()
            await group.until(lambda: group.group.checkpoints)
            first = group.group.checkpoints[0]
            assert pin(first.url)
            await group.until(lambda: len(group.group.checkpoints) >= 6 and group.group.pruned)
            assert first.url in [c.url for c in catalog(str(tmp_path))]
            assert first.url not in group.group.pruned

    asyncio.run(run())


def test_the_one_that_is_being_restored_outlives_retention(tmp_path: Path) -> None:
    """A write that was begun before a failure may end while ranks restore."""

    async def run() -> None:
        async with led(led_spec(tmp_path, every_steps=10, keep_last=2)) as group:
            await group.launch()
            await group.until(lambda: group.group.checkpoints)
            first = group.group.checkpoints[0]
            restoring = RestoreOrder(Source.STORAGE, first.step, first.url)
            group.group = replace(group.group, restore=restoring, training=False)
            await group.until(lambda: len(group.group.checkpoints) >= 5 and group.group.pruned)
            assert first.url in [c.url for c in catalog(str(tmp_path))]
            group.group = replace(group.group, training=True)
            await group.until(lambda: first.url in group.group.pruned)

    asyncio.run(run())


def test_by_time_at_the_interval_that_cost_and_failures_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "LEAD_S", 0.1)
    monkeypatch.setattr("workers.checkpoint.interval.FIRST_S", 0.2)
    monkeypatch.setattr("workers.checkpoint.interval.LEAST_S", 0.1)
    monkeypatch.setattr("workers.checkpoint.interval.PRIOR_S", 0.5)

    async def run() -> None:
        async with led(led_spec(tmp_path, auto_checkpoints=True)) as group:
            await group.launch()
            await group.until(lambda: len(group.group.checkpoints) >= 2)

    asyncio.run(run())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "STALL_S", 0.25)
    monkeypatch.setattr(saving, "LOOK_S", 0.05)
    monkeypatch.setattr(pacing, "RETRY_S", 0.02)


def hang(storage: Path, step: int, name: str = "rank-0.safetensors") -> int:
    """The write of that file goes into a pipe that nobody reads: the descriptor of its other end."""
    folder = storage / FOLDER / folder_name(step, 1, 0)
    folder.mkdir(parents=True)
    pipe = folder / f".{name}.{os.getpid()}.part"
    os.mkfifo(pipe)
    return os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)


async def let_go(group: Led, *pipes: int) -> None:
    def read() -> bool:
        for pipe in pipes:
            with contextlib.suppress(BlockingIOError):
                os.read(pipe, 1 << 20)
        return all(write.done for write in group.agents[0].shares.stuck)

    await group.until(read)
    for pipe in pipes:
        os.close(pipe)


@pytest.mark.usefixtures("impatient")
def test_storage_that_hangs_holds_up_neither_the_next_nor_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        pipe = hang(tmp_path, 20)
        async with led(led_spec(tmp_path, every_steps=20)) as group:
            await group.launch()
            await group.until(lambda: group.heard("CheckpointStalled"))
            (told,) = group.heard("CheckpointStalled")
            assert told.startswith(f"step 20: {tmp_path} has taken no byte for ")
            assert ", 0 of 40" in told
            assert len(group.agents[0].shares.stuck) == 1
            await group.until(lambda: len(group.group.checkpoints) >= 2)
            assert 20 not in [c.step for c in group.group.checkpoints]
            await let_go(group, pipe)
            assert [c.step for c in catalog(str(tmp_path)) if c.step == 20 and c.problem is None] == []

    asyncio.run(run())


@pytest.mark.usefixtures("impatient")
def test_no_more_than_two_writes_are_left_hanging(tmp_path: Path) -> None:
    async def run() -> None:
        pipes = [hang(tmp_path, step) for step in (200, 400)]
        async with led(led_spec(tmp_path, every_steps=200)) as group:
            await group.launch()
            await group.until(lambda: group.heard("CheckpointFailed"))
            assert len(group.heard("CheckpointStalled")) == 2
            assert group.heard("CheckpointFailed")[0] == f"step 600: 2 earlier writes still hang in {tmp_path}, which must answer first"
            await let_go(group, *pipes)

    asyncio.run(run())


def ends_at(step: int) -> str:
    return SCRIPT.replace("while True:", f"for _ in range({step}):")


async def ended(group: Led) -> None:
    """Its ranks have ended by themselves, and nothing was saved yet."""
    await group.until(lambda: group.steps() and not group.agents[0].ranks.living, look=False)
    await group.stop()


@pytest.mark.usefixtures("impatient")
def test_the_final_save_has_a_limit_and_tells(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path), ends_at(30)) as group:
            await group.launch()
            await ended(group)
            pipe = hang(tmp_path, 30)
            problem = await group.saver.save_final(group.seen())
            assert problem is not None
            assert "has taken no byte" in problem
            await let_go(group, pipe)

    asyncio.run(run())


def test_the_final_save_is_in_storage(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path), ends_at(30)) as group:
            await group.launch()
            await ended(group)
            assert await group.saver.save_final(group.seen()) is None
            (ref,) = catalog(str(tmp_path))
            assert (ref.step, verify(ref.url)) == (30, None)

    asyncio.run(run())


def test_a_replaced_attempt_commits_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path, every_steps=20)) as group:
            await group.launch()
            await group.until(lambda: group.group.checkpoints)
            claim(str(tmp_path), Lease(group.spec.job_id, 2, 1))
            before = len(group.group.checkpoints)
            await group.until(lambda: group.heard("CheckpointFailed"))
            assert "attempt 1, generation 0 was replaced by attempt 2, generation 1" in group.heard("CheckpointFailed")[0]
            assert len([c for c in catalog(str(tmp_path)) if c.problem is None]) <= before

    asyncio.run(run())


def test_the_drill_damages_for_real_and_is_found(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path, every_steps=20)) as group:
            await group.launch()
            with pytest.raises(ValueError, match="no whole checkpoint to damage"):
                await group.saver.corrupt_newest()
            await group.until(lambda: len(group.group.checkpoints) >= 3 and not group.saver.busy)
            said = await group.saver.corrupt_newest()
            await asyncio.wait_for(group.saver._checking or asyncio.sleep(0), 10)
            assert "was changed" in said
            (found,) = group.heard("CheckpointInvalid")
            assert "does not match its checksum" in found
            assert "a drill damaged it (found in 0." in found
            (bad,) = group.group.damaged
            assert verify(bad) is not None
            await group.saver.corrupt_newest()
            await group.saver.corrupt_newest()
            await asyncio.wait_for(group.saver._checking or asyncio.sleep(0), 10)
            assert len(group.group.damaged) == 3
            assert None not in [verify(url) for url in group.group.damaged]

    asyncio.run(run())


def test_damage_done_twice_is_no_repair(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path, every_steps=20)) as group:
            await group.launch()
            await group.until(lambda: group.group.checkpoints)
            url = group.group.checkpoints[0].url
            for _ in range(3):
                change_a_byte(url)
                assert verify(url) is not None

    asyncio.run(run())


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=60", "tmpfs", str(place)], capture_output=True, check=False
    ).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def fill_up(place: Path) -> str:
    with contextlib.suppress(OSError):
        (place / "filler").write_bytes(b"x" * (2 << 20))
    return "DISK_FULL: "


def use_up_inodes(place: Path) -> str:
    with contextlib.suppress(OSError):
        for number in range(100):
            (place / f"filler-{number}").touch()
    return "has room for 0 more files"


def make_read_only(place: Path) -> str:
    folder = str(place / FOLDER)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    return "Read-only file system; make it writable"


@pytest.mark.parametrize("spoil", [fill_up, use_up_inodes, make_read_only])
def test_a_disk_that_takes_no_more_costs_the_checkpoint_and_nothing_else(small: Path, spoil: Callable[[Path], str]) -> None:
    async def run() -> None:
        async with led(led_spec(small, every_steps=10, keep_last=2)) as group:
            await group.launch()
            await group.until(lambda: len(group.group.checkpoints) >= 2)
            expected = spoil(small)
            await group.until(lambda: group.heard("CheckpointFailed"))
            assert expected in group.heard("CheckpointFailed")[-1]
            before = group.steps()
            await group.until(lambda: group.steps() > before + 5)
            sound = [c for c in catalog(str(small)) if c.problem is None]
            assert sound
            assert verify(sound[0].url) is None
            assert not parts(small)

    try:
        asyncio.run(run())
    finally:
        subprocess.run(["umount", "-l", str(small / FOLDER)], check=False, capture_output=True)


def test_generations_go_on_where_storage_says_that_they_were(tmp_path: Path) -> None:
    """Coordinator, agents and shared memory are gone at once: what is saved next must be the newest."""
    given = led_spec(tmp_path)
    (tmp_path / "logs" / "a1" / "g7").mkdir(parents=True)
    (tmp_path / "logs" / "a2" / "g9").mkdir(parents=True)
    assert read_catalog(given, -1) == ((), 7)
    (tmp_path / FOLDER / folder_name(30, 1, 8)).mkdir(parents=True)
    assert read_catalog(given, -1) == ((), 8)
    assert read_lease(str(tmp_path)) == Lease(given.job_id, 1, 8)
