"""Ranks as they are: scripts, modules and programs of every ending, forked from a real launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from tests.workers.launched import Launched
from workers.board import Board
from workers.rank import TRACEBACK_BYTES, parse_python


@pytest.mark.parametrize(
    ("case", "code", "printed"),
    [
        ("nothing", 0, ""),
        ("none", 0, ""),
        ("three", 3, ""),
        ("text", 1, "no data folder\n"),
        ("large", 7, ""),
        ("exit_now", 9, ""),
        ("kill", -9, ""),
        ("segv", -11, ""),
        ("argv", 0, f"{['case.py', '--name', 'a b', '', 'ü', chr(0xDCFF)]!r} __main__ case.py True\n"),
        ("pickle", 0, "5 True\n"),
        ("atexit", 0, "main ends\nat exit\n"),
        ("thread", 0, "thread ends\n"),
        ("streams", 0, "out\nerr\nchild\nTrue\n"),
        ("clean", 0, "[]\n"),
        ("signals", 0, "True\n"),
        ("zombies", 0, ""),
    ],
)
def test_a_script_ends_as_in_a_plain_interpreter(launcher: Launched, case: str, code: int, printed: str) -> None:
    assert launcher.run(case) == (code, printed)
    assert launcher.error() is None


def test_place_of_a_rank(launcher: Launched) -> None:
    code, printed = launcher.run("place")
    assert (code, printed) == (0, f"True True {launcher.next - 1}\n")
    board = Board.open(launcher.shm / f"board-{launcher.next - 1}").read()
    assert (board.generation, board.attached, board.failed_at) == (5, False, None)


@pytest.mark.parametrize(
    ("case", "type", "message", "in_place"),
    [
        ("raise", "ValueError", "bad sample ü", "case.py:"),
        ("deep", "ZeroDivisionError", "division by zero", " in deep"),
        ("mute", "Mute", "(no text: __str__ raised)", "case.py:"),
        ("library", "json.decoder.JSONDecodeError", "Expecting property name", "case.py:"),
        ("moved", "json.decoder.JSONDecodeError", "Expecting property name", "case.py:"),
        ("homeless", "ValueError", "bad sample", "case.py:"),
        ("long", "ValueError", "x" * 4096, "case.py:"),
    ],
)
def test_an_exception_is_left_as_text(launcher: Launched, case: str, type: str, message: str, in_place: str) -> None:
    code, printed = launcher.run(case)
    error = launcher.error()
    assert (code, error is not None) == (1, True)
    assert error is not None
    assert (error.type, error.message[: len(message)], in_place in error.place) == (type, message, True)
    assert len(error.message) <= 4096
    assert 0 < len(error.traceback) <= TRACEBACK_BYTES
    assert type.rsplit(".", 1)[-1] in printed
    assert not (launcher.shm / f"error-{launcher.next - 1}.new").exists()


def test_a_traceback_shows_the_users_frames_only(launcher: Launched) -> None:
    _, printed = launcher.run("raise")
    error = launcher.error()
    assert error is not None
    assert error.traceback.count('File "') == 1
    assert printed == error.traceback
    assert Board.open(launcher.shm / f"board-{launcher.next - 1}").read().failed_at is not None


def test_an_exception_in_a_child_that_the_script_forked_is_not_the_ranks(launcher: Launched) -> None:
    code, printed = launcher.run("forked")
    assert (code, printed.splitlines()[-2:]) == (0, ["ValueError: of the child", "1"])
    assert launcher.error() is None
    assert Board.open(launcher.shm / f"board-{launcher.next - 1}").read().failed_at is None


def test_an_interrupt_is_told_apart(launcher: Launched) -> None:
    code, _ = launcher.run("interrupt")
    error = launcher.error()
    assert error is not None
    assert (code, error.type) == (130, "KeyboardInterrupt")


@pytest.mark.parametrize(
    ("command", "code", "printed"),
    [
        (["python", "-m", "module", "x", "-y"], 4, "['x', '-y'] __main__ module\n"),
        (["printf", "%s|", "a b", "", "ü", "$HOME", "\udcff"], 0, "a b||ü|$HOME|\udcff|"),
        (["sh", "-c", "echo $CASE $0; exit 5", "word"], 5, "given word\n"),
        (["sh", "-c", "kill -KILL $$"], -9, ""),
        (["bash", "-o", "pipefail", "-c", "yes | head -n1"], 141, "y\n"),
    ],
)
def test_other_programs(launch: Callable[[list[str]], Launched], command: list[str], code: int, printed: str) -> None:
    launcher = launch(command)
    number, _ = launcher.start("given")
    assert launcher.ended(number) == code
    assert launcher.log(number).read_bytes() == os.fsencode(printed)
    assert launcher.error() is None


@pytest.mark.parametrize(
    ("command", "code", "type", "words"),
    [
        (["no-such-program"], 127, "FileNotFoundError", "cannot execute 'no-such-program': No such file or directory"),
        (["./case.py"], 126, "PermissionError", "cannot execute './case.py': Permission denied"),
    ],
)
def test_a_program_that_cannot_be_executed(
    launch: Callable[[list[str]], Launched], command: list[str], code: int, type: str, words: str
) -> None:
    launcher = launch(command)
    assert launcher.run() == (code, f"{words}\n")
    error = launcher.error()
    assert error is not None
    assert (error.type, error.message) == (type, words)


@pytest.mark.parametrize(("script", "type"), [("none.py", "FileNotFoundError"), ("bad.py", "SyntaxError")])
def test_a_script_that_cannot_be_read(launch: Callable[[list[str]], Launched], script: str, type: str) -> None:
    launcher = launch(["python", script])
    (launcher.work / "bad.py").write_text("x = 1\nif True print(1)\n")
    code, printed = launcher.run()
    error = launcher.error()
    assert error is not None
    assert (code, error.type) == (1, type)
    assert script in printed
    if script == "bad.py":
        assert error.place == "bad.py:2"


@pytest.mark.parametrize(
    ("command", "argv", "module"),
    [
        (["python", "train.py", "--steps", "5"], ["train.py", "--steps", "5"], False),
        (["python3", "-u", "train.py"], ["train.py"], False),
        (["python", "-m", "pkg.train", "-x"], ["pkg.train", "-x"], True),
        (["python", "-u", "-m", "pkg"], ["pkg"], True),
        ([sys.executable, "train.py"], ["train.py"], False),
    ],
)
def test_what_is_forked(command: list[str], argv: list[str], module: bool) -> None:
    program = parse_python(command)
    assert program is not None
    assert (program.argv, program.module) == (argv, module)


@pytest.mark.parametrize(
    "command",
    [
        ["python"],
        ["python", "-m"],
        ["python", "-c", "print(1)"],
        ["python", "-O", "x.py"],
        ["/other/python", "x.py"],
        ["torchrun", "x.py"],
        ["x.py"],
    ],
)
def test_what_is_executed_as_it_is(command: list[str]) -> None:
    assert parse_python(command) is None
