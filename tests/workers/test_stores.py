"""The store at which the ranks of a generation meet: when it ends before they met, they do not wait for it until their time is over."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.workers.ranked import Ranked, ranked
from workers.messages import LaunchOrder, RestoreOrder, Source
from workers.processes import below


def listener(one: Ranked, port: int) -> int:
    """The process below the launcher that listens there."""
    assert one.ranks.launcher_pid is not None
    found = [pid for pid in below(one.ranks.launcher_pid) for each in psutil.Process(pid).net_connections() if each.laddr.port == port]
    return found[0]


async def kill_store(one: Ranked, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await one.until(lambda: 1 not in one.ranks._stores)


@pytest.mark.parametrize("when", ["before the launch", "after the launch"])
def test_a_store_that_ends_before_the_ranks_met_ends_them(tmp_path: Path, when: str) -> None:
    async def run() -> None:
        async with ranked(tmp_path, "import time; time.sleep(600)") as one:
            await one.ranks.stop(0)
            port = await one.ranks.open_store(1, "127.0.0.1")
            pid = listener(one, port)
            if when == "before the launch":
                await kill_store(one, pid)
            one.ranks.launch(LaunchOrder(1, RestoreOrder(Source.NONE, 0), 1, "127.0.0.1", port, True), None)
            if when == "after the launch":
                await one.until(lambda: one.ranks.pids())
                await kill_store(one, pid)
            (report,) = await one.all_ended()
            assert (report.generation, report.signal, report.ours) == (1, signal.SIGKILL, False)
            assert [(rank, reason) for rank, reason, _ in one.ranks.notes] == [(0, "StoreLost")]

    asyncio.run(run())


STEPS = """
import time, workers
run = workers.start()
run.restore(state={"w": 0})
while True:
    run.step(state={"w": 0})
    time.sleep(0.01)
"""


def steps(one: Ranked) -> int:
    return one.ranks.reports()[0].step or 0


def test_ranks_that_have_met_go_on_without_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with ranked(tmp_path, STEPS) as one:
            await one.ranks.stop(0)
            port = await one.ranks.open_store(1, "127.0.0.1")
            pid = listener(one, port)
            one.ranks.launch(LaunchOrder(1, RestoreOrder(Source.NONE, 0), 1, "127.0.0.1", port, True), None)
            await one.until(lambda: steps(one) >= 2)
            await kill_store(one, pid)
            reached = steps(one)
            await one.until(lambda: steps(one) > reached + 10)

    asyncio.run(run())
