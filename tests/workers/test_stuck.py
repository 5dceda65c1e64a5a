"""What does not answer, or cannot be understood, holds nobody up for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.workers.make import NOW, ended, group, look, rank, short, spec, status
from tests.workers.ranked import ranked
from workers import ranks
from workers.checkpoint.catalog import clear_staged
from workers.ending import STOP_LIMIT_S
from workers.group import Doing, Kept
from workers.kept import read_kept, write_kept
from workers.messages import FailureClass, Outcome
from workers.processes import os_state
from workers.restart import FILES_S, decide
from workers.workdir import missing

SLEEPS = "import time\ntime.sleep(600)\n"


def test_a_launcher_that_does_not_answer_is_ended_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STOP_S", 0.5)

    async def run() -> list[int]:
        async with ranked(tmp_path, SLEEPS, ranks=2) as one:
            pids = list(one.ranks.pids().values())
            assert one.ranks.launcher_pid is not None
            os.kill(one.ranks.launcher_pid, signal.SIGSTOP)
            assert await one.ranks.stop(0) == []
            assert not one.ranks.living
            assert not one.ranks.launcher_lives
            return [pid for pid in pids if os_state(pid) not in (None, "Z")]

    assert asyncio.run(run()) == []


def test_a_launcher_that_still_imports_is_not_asked_to_stop_what_it_does_not_have(tmp_path: Path) -> None:
    """It would answer after the import only, which takes longer than the patience with one that does not answer."""

    async def run() -> None:
        async with ranked(tmp_path, SLEEPS, ranks=2) as one:
            first = one.ranks.launcher_pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await one.until(lambda: not one.ranks.living)
            one.ranks.start_launcher(one.work)
            second = one.ranks.launcher_pid
            assert second is not None
            os.kill(second, signal.SIGSTOP)
            assert await asyncio.wait_for(one.ranks.stop(0), 1) == []
            os.kill(second, signal.SIGCONT)
            await one.until(lambda: one.ranks.ready)
            assert one.ranks.launcher_pid == second

    asyncio.run(run())


def test_an_exception_with_bytes_that_are_no_text_can_be_kept_and_told(tmp_path: Path) -> None:
    async def run() -> str:
        async with ranked(tmp_path, "raise FileNotFoundError('caf\\udce9.txt')\n") as one:
            (report,) = await one.all_ended()
            assert report.error is not None
            write_kept(one.shm, Kept(1, 1, group(Doing.STOPPING, ranks=(report,))))
            kept = read_kept(one.shm)
            assert kept is not None
            assert kept.group.ranks == (report,)
            return report.error.message

    assert asyncio.run(run()) == "caf\\udce9.txt"


@pytest.mark.parametrize("doing", [Doing.STOPPING, Doing.LOCATING, Doing.CLOSING])
def test_an_agent_that_answers_and_never_ends_its_ranks_is_given_up(doing: Doing) -> None:
    before = group(doing, outcome=Outcome.FAILED if doing is Doing.CLOSING else None)
    seen = look(status(0), status(1, rank(1), stopped=False))
    assert short(decide(before, seen, before.since + STOP_LIMIT_S))[0] is doing
    after = decide(before, seen, before.since + STOP_LIMIT_S + 1).group
    if doing is Doing.CLOSING:
        assert (after.doing, after.outcome) == (Doing.ENDED, Outcome.FAILED)
    else:
        assert (after.doing, after.outcome, after.reason) == (Doing.CLOSING, Outcome.LOST, "ProcessesStuck")


def test_files_that_storage_does_not_tell_of_are_no_fault_of_the_script() -> None:
    given = spec(success_files=("out.pt",))
    left = [ended(n, 0, NOW) for n in (0, 1)]
    seen = look(*(status(n, report) for n, report in enumerate(left)))
    before = group(Doing.TRAINING, given=given, training=True, started_at=NOW - 15)
    assert short(decide(before, seen, NOW + FILES_S))[2] == "LookingForFiles"
    decision = decide(before, seen, NOW + FILES_S + 1)
    (incident,) = decision.group.incidents
    assert (incident.kind, incident.cause) == (FailureClass.INFRASTRUCTURE, "files_unseen")
    assert "whether success.files out.pt exist" in incident.message


def test_a_file_that_cannot_be_looked_for_is_missing(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    assert missing(tmp_path, ("there", "x" * 300, "there/below", "no\0name")) == ("x" * 300, "there/below", "no\0name")


def test_a_new_agent_frees_what_a_killed_one_had_staged(tmp_path: Path) -> None:
    for name in ("staged-1", ".staged-2.abc", "snap-0-0"):
        (tmp_path / name).mkdir()
    clear_staged(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["snap-0-0"]
