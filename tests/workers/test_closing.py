"""What an agent leaves when it closes: nothing, whatever it is told then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.workers.led import Led, led_spec


def test_an_order_that_comes_late_makes_nothing_anew(tmp_path: Path) -> None:
    async def run() -> None:
        led = Led(led_spec(tmp_path))
        (agent,) = led.agents
        await agent.close(1)
        for order in (lambda: agent.stage(1, str(tmp_path / "c")), lambda: agent.fetch(1, 3, [])):
            with pytest.raises(RuntimeError, match="nothing starts here any more"):
                await order()
        assert not agent.shm.exists()
        assert await agent.close(1) == []  # may be asked for again

    asyncio.run(run())
