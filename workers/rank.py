"""What a forked process does to become a rank: session, log pipe, environment, board; then the user's command as ``__main__``.

Invariants: nothing of the launcher but imported modules is visible to user code; an uncaught exception is left as text in
``error-<rank>.json`` before the process ends; the exit code is the one that a plain interpreter would give.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import traceback
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.board import Board
from workers.drills import arm
from workers.messages import ErrorReport

TRACEBACK_BYTES = 16_384
CANNOT_START = 125  # exit code of a rank whose own setup failed
_PR_SET_PTRACER = 0x59616D61


def run_rank(config: dict[str, Any], order: dict[str, Any], log: int) -> int:
    """Run the command of ``config`` with the environment of ``order``; returns the exit code, or never where the command is executed."""
    os.setsid()
    _take_streams(log)
    os.environ.update(order["env"])
    shm = Path(config["shm"])
    rank = int(order["rank"])
    error_file = shm / f"error-{rank}.json"
    try:
        board = Board.create(shm / f"board-{rank}", order["generation"], os.getpid())
        os.chdir(config["cwd"])
    except OSError as error:  # not of the user's making: nothing of theirs has run
        message = f"the rank's own folders cannot be used: {error}"
        print(f"keepstep: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            _write(error_file, ErrorReport(type(error).__name__, message, message, "before the first line", ours=True))
        return CANNOT_START
    _allow_stacks()
    arm()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:  # every process starts with entropy of its own, as without a fork
        sys.modules["numpy"].random.seed()
    command: list[str] = config["command"]
    program = parse_python(command)
    if program is None:
        return _execute(command, error_file)
    return _run(program, board, error_file, config["cwd"])


def _run(program: PythonProgram, board: Board, error_file: Path, cwd: str) -> int:
    rank = os.getpid()
    try:
        program.run()
        return 0
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _show(error)
        if os.getpid() == rank:  # else a child that the script forked, which speaks for itself only
            _write(error_file, _report(error, cwd))
            board.failed()
    if code and (held := sys.modules.get("workers.run")) is not None:
        held.failed()
    return code


class PythonProgram:
    """A script or module that runs in the forked interpreter."""

    def __init__(self, argv: list[str], module: bool) -> None:
        self.argv = argv
        self.module = module

    def run(self) -> None:
        sys.argv = list(self.argv)
        if self.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.argv[0], run_name="__main__", alter_sys=True)
            return
        path = self.argv[0]
        if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
            runpy.run_path(path, run_name="__main__")
            return
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        with open(path, "rb") as file:
            source = file.read()
        # A real module under the name __main__ that stays: pickling and multiprocessing look their classes up there.
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = main
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def parse_python(command: list[str]) -> PythonProgram | None:
    """The program when ``command`` is [python, (-u,) script.py, ...] or [python, -m, module, ...]; None: execute it as it is."""
    if os.path.basename(command[0]) not in ("python", "python3") or ("/" in command[0] and command[0] != sys.executable):
        return None
    rest = command[2:] if command[1:2] == ["-u"] else command[1:]
    if len(rest) >= 2 and rest[0] == "-m":
        return PythonProgram(rest[1:], module=True)
    if rest and not rest[0].startswith("-"):
        return PythonProgram(rest, module=False)
    return None


def _take_streams(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (null, log):
        if fd > 2:
            os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _allow_stacks() -> None:
    """Where Yama restricts it, only ancestors may read a process; the agent's py-spy is none."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def _execute(command: list[str], error_file: Path) -> int:
    program = sys.executable if command[0] in ("python", "python3") else command[0]  # the one with the frameworks
    try:
        _python_signals(signal.SIG_DFL)
        os.execvp(program, command)
    except OSError as error:
        _python_signals(signal.SIG_IGN)
        message = f"cannot execute {command[0]!r}: {error.strerror}"
        print(message, file=sys.stderr, flush=True)
        _write(error_file, ErrorReport(type(error).__name__, message, message, f"command {command[0]!r}"))
        return 126 if isinstance(error, PermissionError) else 127


def _python_signals(action: signal.Handlers) -> None:
    """Those that Python ignores for itself; another program expects them as a shell leaves them: ``yes | head`` ends by SIGPIPE."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, action)


def _exit_code(stop: SystemExit) -> int:
    """As the interpreter does: None is 0, a number is itself, anything else is printed and 1."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr, flush=True)
    return 1


def _show(error: BaseException) -> None:
    """As the interpreter does, but for our own frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    error.__traceback__ = trace
    with contextlib.suppress(Exception):
        sys.excepthook(type(error), error, trace)
    sys.stderr.flush()


def _report(error: BaseException, cwd: str) -> ErrorReport:
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # a __str__ or __cause__ of the user's class may itself raise
        text = f"{type(error).__qualname__} (its text cannot be made)\n" + "".join(traceback.format_tb(error.__traceback__))
    try:
        message = str(error)
    except Exception:
        message = "(no text: __str__ raised)"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    return ErrorReport(name, message[:4096], text[-TRACEBACK_BYTES:], _place(error, cwd))


def _place(error: BaseException, cwd: str) -> str:
    """Innermost frame of the user's own code, else the innermost frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if os.path.join(cwd, f.filename).startswith(cwd) and "site-packages" not in f.filename]
    if not frames:
        return "before the first line"
    frame = (own or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def _write(file: Path, report: ErrorReport) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(report)))
    os.replace(fresh, file)
