"""SIGTERM and data loaders with real ranks: who hears the signal, who has time to save, and what ends with a rank."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.workers.launched import lives, wait_end
from tests.workers.ranked import ranked
from workers.hangs import judge_hang
from workers.messages import RankReport
from workers.processes import below
from workers.stacks import take
from workers.verdict import Verdict, judge

SAVES = """
import os, signal, sys, time

def told(who):
    def handler(number, frame):
        print(who, "was told", flush=True)
        if who == "main":
            time.sleep(0.3)  # a save that needs its helpers
            print("saved, helper", "lives" if os.waitpid(helper, os.WNOHANG) == (0, 0) else "is gone", flush=True)
            sys.exit(0)
    return handler

helper = os.fork()
signal.signal(signal.SIGTERM, told("main" if helper else "helper"))
print("up" if helper else "helper up", flush=True)
while True:
    time.sleep(600)
"""


def test_only_the_main_process_of_each_rank_is_told_and_its_helpers_end_with_it(tmp_path: Path) -> None:
    async def run() -> tuple[tuple[RankReport, ...], list[str], list[int]]:
        async with ranked(tmp_path, SAVES, ranks=2) as one:
            await one.until(lambda: all({"up", "helper up"} <= set(one.log(n).splitlines()) for n in (0, 1)))
            helpers = [pid for rank in one.ranks.pids().values() for pid in below(rank)]
            one.ranks.terminate()
            one.ranks.terminate()  # told once, whatever is repeated
            return await one.all_ended(), [one.log(n) for n in (0, 1)], helpers

    reports, logs, helpers = asyncio.run(run())
    for log in logs:
        assert log.count("main was told") == 1
        assert "saved, helper lives" in log
        assert "helper was told" not in log
    assert [(r.exit_code, r.ours) for r in reports] == [(0, True), (0, True)]
    assert judge(reports) is None
    assert len(helpers) == 2
    assert all(wait_end(pid) or not lives(pid) for pid in helpers)


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ["RANK"] == "1" else lambda *_: os._exit(0))
print("up", flush=True)
while True:
    time.sleep(600)
"""


def test_a_deaf_rank_takes_no_time_from_another_and_is_ended_at_last(tmp_path: Path) -> None:
    async def run() -> tuple[RankReport, ...]:
        async with ranked(tmp_path, DEAF, ranks=2) as one:
            await one.until(lambda: "up" in one.log(0) and "up" in one.log(1))
            one.ranks.terminate()
            await one.until(lambda: one.ranks.reports()[0].ended_at is not None)
            assert one.ranks.reports()[1].ended_at is None
            assert await one.ranks.stop(0) == []
            return await one.all_ended()

    heard, deaf = asyncio.run(run())
    assert (heard.exit_code, heard.signal, heard.ours) == (0, None, True)
    assert (deaf.exit_code, deaf.signal, deaf.ours) == (None, 9, True)
    assert judge((heard, deaf)) is None


LOADER = """
import os, signal, time, torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 50:
            print("at 50", flush=True)
            {does}
        return torch.zeros(1)

for batch in torch.utils.data.DataLoader(Samples(), num_workers=2):
    pass
"""


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("time.sleep(600)", "which is in Samples.__getitem__ (case.py:"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "which is stopped (SIGSTOP)"),
    ],
)
def test_a_data_loader_process_that_hangs_is_named_and_ends_with_its_rank(tmp_path: Path, does: str, why: str) -> None:
    async def run() -> tuple[Verdict, list[int]]:
        async with ranked(tmp_path, LOADER.format(does=does)) as one:
            await one.until(lambda: "at 50" in one.log(0))
            children = below(one.ranks.pids()[0])
            for _ in range(100):
                (found,) = await asyncio.to_thread(take, one.ranks.pids())
                verdict = judge_hang(one.ranks.reports(), {0: found}, "silent", 0.0)
                if why in verdict.evidence:
                    break
            await one.ranks.stop(0)
            return verdict, children

    verdict, children = asyncio.run(run())
    assert f"it waits for its data loader process {children[0]}" in verdict.evidence
    assert why in verdict.evidence
    assert len(children) == 2
    assert all(wait_end(pid) or not lives(pid) for pid in children)
