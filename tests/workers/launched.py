"""A real launcher at the other end of a socket pair, and a script that does what the variable CASE says."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workers.launcher import MESSAGE_BYTES
from workers.messages import ErrorReport
from workers.processes import os_state

CASES = r'''
import atexit, os, pickle, signal, sys, threading, time

class Sample:
    def __init__(self, value): self.value = value

class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")

def daemon(fd):
    """Forked twice, with a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(fd, b"%d\n" % os.getpid())
            time.sleep(600)
        os._exit(0)

def deep(n):
    return deep(n - 1) if n else 1 / 0

case = os.environ["CASE"]
if case == "three": sys.exit(3)
if case == "none": sys.exit()
if case == "text": sys.exit("no data folder")
if case == "large": sys.exit(256 + 7)
if case == "raise": raise ValueError("bad sample ü")
if case == "deep": deep(900)
if case == "mute": raise Mute()
if case == "library": import json; json.loads("{")
if case == "moved": os.chdir("/"); import json; json.loads("{")
if case == "homeless": os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone"); raise ValueError("bad sample")
if case == "long": raise ValueError("x" * 100_000)
if case == "interrupt": raise KeyboardInterrupt
if case == "kill": os.kill(os.getpid(), signal.SIGKILL)
if case == "segv": os.kill(os.getpid(), signal.SIGSEGV)
if case == "exit_now": os._exit(9)
if case == "argv": print(repr(sys.argv), __name__, __file__, sys.path[0] == os.getcwd())
if case == "pickle": print(pickle.loads(pickle.dumps(Sample(5))).value, sys.modules["__main__"].Sample is Sample)
if case == "atexit": atexit.register(print, "at exit"); print("main ends")
if case == "thread": threading.Thread(target=lambda: (threading.main_thread().join(), print("thread ends"))).start()
if case == "streams": print("out"); print("err", file=sys.stderr); os.system("echo child"); print(sys.stdin.read() == "")
if case == "place": print(os.getcwd() == os.path.dirname(os.path.abspath(__file__)), os.getsid(0) == os.getpid(), os.environ["RANK"])
if case == "clean": print(sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "ray", "tensorflow", "sqlalchemy")))
if case == "signals":
    known = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    print(known == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL])
if case == "child":
    here, there = os.pipe()
    if os.fork() == 0: os.write(1, b"%d\n" % os.getpid()); os.close(there); time.sleep(600)
    os.close(there); os.read(here, 1)
if case == "forked":
    child = os.fork()
    if child == 0: raise ValueError("of the child")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if case == "daemon": daemon(1); sys.stdout.flush(); time.sleep(600)
if case == "sleep": print("up"); time.sleep(600)
if case == "fds":
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    print(sorted(os.path.basename(name).rstrip("0123456789") for name in names))
    time.sleep(600)
if case == "zombies": [os._exit(0) for _ in range(50) if os.fork() == 0]
'''


class Launched:
    """A launcher with its socket. ``ended`` waits for the end of a rank."""

    def __init__(self, home: Path, command: list[str]) -> None:
        self.shm, self.work = home / "shm", home / "work"
        for folder in (self.shm, self.work):
            folder.mkdir(exist_ok=True)
        (self.work / "case.py").write_text(CASES)
        (self.work / "module").mkdir(exist_ok=True)
        (self.work / "module" / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__, __package__)\nsys.exit(4)\n")
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(15)
        config = self.shm / "launcher.json"
        config.write_text(json.dumps({"framework": "plain", "command": command, "cwd": str(self.work), "shm": str(self.shm)}))
        arguments = [sys.executable, "-P", "-m", "workers.launcher", str(theirs.fileno()), str(config)]
        self.tmp = tempfile.TemporaryDirectory(prefix="keepstep-test-")  # a short path, for sockets
        env = os.environ | {"TMPDIR": self.tmp.name}
        self.process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self.next = 0
        ready = self.hear("ready")
        assert ready["problem"] is None

    def hear(self, op: str) -> dict[str, Any]:
        """The next message of that kind; those before it are passed over."""
        while data := self.link.recv(MESSAGE_BYTES):
            message: dict[str, Any] = json.loads(data)
            if message["op"] == op:
                return message
        raise EOFError

    def start(self, case: str = "") -> tuple[int, int]:
        """(number, pid) of a new rank."""
        number, self.next = self.next, self.next + 1
        log = os.open(self.log(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        order = {"op": "rank", "rank": number, "generation": 5, "env": {"CASE": case, "RANK": str(number)}}
        socket.send_fds(self.link, [json.dumps(order).encode()], [log])
        os.close(log)
        forked = self.hear("forked")
        assert (forked["rank"], forked["generation"]) == (number, 5)
        return number, forked["pid"]

    def ended(self, number: int) -> int:
        while True:
            message = self.hear("exited")
            if message["rank"] == number:
                return int(message["code"])

    def run(self, case: str = "") -> tuple[int, str]:
        """(exit code as of waitpid, what it printed)"""
        number, _ = self.start(case)
        code = self.ended(number)
        return code, self.log(number).read_text()

    def log(self, number: int) -> Path:
        return self.shm / f"log-{number}"

    def error(self) -> ErrorReport | None:
        """Of the newest rank."""
        file = self.shm / f"error-{self.next - 1}.json"
        return ErrorReport(**json.loads(file.read_text())) if file.exists() else None

    def first_line(self, number: int) -> str:
        """Waits until the rank has said it."""
        while True:
            lines = self.log(number).read_text().splitlines(keepends=True)
            if lines and lines[0].endswith("\n"):
                return lines[0].strip()
            os.sched_yield()

    def children(self) -> list[int]:
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            return [int(pid) for pid in file.read().split()]

    def reserve(self, rank: int) -> int:
        """Waits until the launcher keeps one beside the rank with that pid."""
        while True:
            if others := [pid for pid in self.children() if pid != rank]:
                return others[0]
            os.sched_yield()

    def kill(self, generation: int = 5) -> None:
        """Order the end of all ranks and wait for the answer."""
        self.link.send(json.dumps({"op": "kill", "generation": generation}).encode())
        killed = self.hear("killed")
        assert (killed["generation"], killed["stuck"]) == (generation, [])

    def close(self) -> None:
        self.link.close()
        self.process.wait(10)
        self.tmp.cleanup()


def wait_end(pid: int) -> bool:
    """False where the process, which need not be our child, has not ended after 10 s."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(handle):
        return bool(select.select([handle], [], [], 10)[0])


def lives(pid: int) -> bool:
    return os_state(pid) not in (None, "Z")
