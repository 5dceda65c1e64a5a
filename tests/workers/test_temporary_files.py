"""Temporary files of ranks lie in a folder of their group on that node and go with it, whatever became of those who made them."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from pathlib import Path

from tests.workers.led import Led, led, led_spec

SHARES = """
import multiprocessing, time
shared = multiprocessing.Manager().dict()  # served at a socket in a temporary folder
print(shared._token.address, flush=True)
time.sleep(600)
"""
MAKES = "import tempfile\nprint(tempfile.mkdtemp(), flush=True)\n"


async def printed(group: Led, home: Path) -> Path:
    """The path that the rank tells."""
    log = home / "logs/a1/g0/rank-0.log"
    await group.until(lambda: log.exists() and log.read_text().endswith("\n"), look=False)
    return Path(log.read_text().strip())


def test_what_killed_ranks_and_their_helpers_leave_goes_with_the_group(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path), SHARES) as group:
            (agent,) = group.agents
            await group.launch()
            socket = await printed(group, tmp_path)
            os.kill(agent.ranks.pids()[0], signal.SIGKILL)
            await group.until(lambda: not agent.ranks.living, look=False)
            assert stat.S_ISSOCK(os.stat(socket).st_mode)
            assert socket.parents[1] == agent.tmp
        assert not agent.tmp.exists()

    asyncio.run(run())


def test_a_folder_that_somebody_cleaned_is_there_again_for_the_next_ranks(tmp_path: Path) -> None:
    async def run() -> None:
        async with led(led_spec(tmp_path), MAKES) as group:
            (agent,) = group.agents
            await group.until(lambda: agent.ranks.ready, look=False)
            agent.tmp.rmdir()
            await group.launch()
            assert (await printed(group, tmp_path)).parent == agent.tmp

    asyncio.run(run())
