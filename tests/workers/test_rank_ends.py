"""What the run that user code holds makes of a rank's end, under a real launcher."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.workers.ranked import ranked
from workers.checkpoint.slots import holdings

ENDS = """
import sys
import numpy as np
import workers

run = workers.start("plain")
run.restore(state=np.zeros(3))
for _ in range(3):
    run.step()
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "steps"),
    [
        ("", 0, {2, 3}),
        ("sys.exit(3)", 3, {2}),
        ("sys.exit('bad')", 1, {2}),
        ("sys.excepthook = lambda *_: None; raise ValueError", 1, {2}),
        ("import os; sys.exit(5) if os.fork() == 0 else os.wait()", 0, {2, 3}),
    ],
)
def test_only_a_good_end_keeps_the_last_step(tmp_path: Path, end: str, code: int, steps: set[int]) -> None:
    async def run() -> int | None:
        async with ranked(tmp_path, ENDS.format(end=end), snapshot_every_steps=2) as one:
            (report,) = await one.all_ended()
            assert {holding.step for holding in holdings(one.shm, [0], verify=True)} == steps, one.log(0)
            return report.exit_code

    assert asyncio.run(run()) == code
