"""The launcher: what it tells of its ranks, and that nothing below it outlives a kill, its socket or itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

from tests.workers.launched import Launched, lives, wait_end
from workers.launcher import MESSAGE_BYTES
from workers.processes import os_state
from workers.verdict import DRILL_EXIT_CODE

NOTHING_ELSE_OPEN = "['board-', 'log-', 'log-', 'null']"


def test_the_signal_of_the_exit_drill_is_an_exit_code(launcher: Launched) -> None:
    number, pid = launcher.start("sleep")
    assert launcher.first_line(number) == "up"
    os.kill(pid, signal.SIGRTMIN + 1)
    assert launcher.ended(number) == DRILL_EXIT_CODE


def test_sigterm_ends_a_script_that_does_not_handle_it(launcher: Launched) -> None:
    number, pid = launcher.start("sleep")
    assert launcher.first_line(number) == "up"
    os.kill(pid, signal.SIGTERM)
    assert launcher.ended(number) == -signal.SIGTERM


def test_children_end_with_their_rank(launcher: Launched) -> None:
    number, _ = launcher.start("child")
    child = int(launcher.first_line(number))
    assert launcher.ended(number) == 0
    assert wait_end(child)


def test_kill_ends_ranks_and_daemons_and_the_launcher_goes_on(launcher: Launched) -> None:
    first, pid = launcher.start("sleep")
    second, parent = launcher.start("daemon")
    daemon = int(launcher.first_line(second))
    assert launcher.first_line(first) == "up"
    assert lives(daemon)
    os.kill(parent, signal.SIGSTOP)
    launcher.kill()
    assert [os_state(p) for p in (pid, parent, daemon)] == [None, None, None]
    assert launcher.run("three") == (3, "")


def test_what_waits_beside_the_ranks_is_ended_when_it_is_stopped_and_ranks_are_not(launcher: Launched) -> None:
    number, rank = launcher.start("sleep")
    reserve = launcher.reserve(rank)
    os.kill(rank, signal.SIGSTOP)
    os.kill(reserve, signal.SIGSTOP)
    assert wait_end(reserve)
    assert os_state(rank) == "T"
    os.kill(rank, signal.SIGKILL)
    assert launcher.ended(number) == -signal.SIGKILL


def test_every_killed_rank_is_reported_before_the_answer(launcher: Launched) -> None:
    pids = dict(launcher.start("sleep") for _ in range(3))
    launcher.link.send(json.dumps({"op": "kill", "generation": 5}).encode())
    heard = [json.loads(launcher.link.recv(MESSAGE_BYTES)) for _ in range(4)]
    assert {m["rank"]: (m["pid"], m["code"]) for m in heard[:3]} == {number: (pid, -9) for number, pid in pids.items()}
    assert heard[3]["op"] == "killed"


def test_no_zombies_are_left(launcher: Launched) -> None:
    launcher.run("zombies")
    launcher.kill()
    assert [pid for pid in launcher.children() if os_state(pid) == "Z"] == []


def test_a_reserve_becomes_the_next_rank(launcher: Launched) -> None:
    number, pid = launcher.start("fds")
    assert launcher.first_line(number) == NOTHING_ELSE_OPEN
    reserve = launcher.reserve(pid)
    launcher.kill()
    assert launcher.children() == [reserve]
    number, pid = launcher.start("fds")
    assert pid == reserve
    assert launcher.first_line(number) == NOTHING_ELSE_OPEN
    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
    os.kill(pid, signal.SIGKILL)
    assert launcher.ended(number) == -signal.SIGKILL


def test_a_reserve_that_was_killed_is_not_missed(launcher: Launched) -> None:
    number, pid = launcher.start("sleep")
    assert launcher.first_line(number) == "up"
    reserve = launcher.reserve(pid)
    os.kill(reserve, signal.SIGKILL)
    assert wait_end(reserve)
    assert launcher.run("three") == (3, "")
    assert lives(pid)


def test_a_reserve_that_is_not_needed_ends_with_the_launcher(launch: Callable[[list[str]], Launched]) -> None:
    for end in (Launched.close, lambda one: one.process.kill()):
        launcher = launch(["python", "case.py"])
        number, pid = launcher.start("sleep")
        assert launcher.first_line(number) == "up"
        reserve = launcher.reserve(pid)
        end(launcher)
        assert wait_end(reserve)
        assert wait_end(pid)


def test_the_launcher_has_one_thread(launcher: Launched) -> None:
    """More would make a fork unsafe."""
    assert len(os.listdir(f"/proc/{launcher.process.pid}/task")) == 1


def test_the_end_of_the_socket_ends_all(launch: Callable[[list[str]], Launched]) -> None:
    launcher = launch(["python", "case.py"])
    number, pid = launcher.start("daemon")
    daemon = int(launcher.first_line(number))
    launcher.close()
    assert launcher.process.returncode == 0
    assert (lives(pid), lives(daemon)) == (False, False)


def test_ranks_end_with_a_killed_launcher(launch: Callable[[list[str]], Launched]) -> None:
    launcher = launch(["python", "case.py"])
    number, pid = launcher.start("sleep")
    assert launcher.first_line(number) == "up"
    launcher.process.kill()
    launcher.process.wait()
    assert wait_end(pid)
