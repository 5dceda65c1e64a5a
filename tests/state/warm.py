"""Ranks that a real launcher forks, so that a generation takes a fraction of a second; otherwise as group.Group."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from group import CLEAN, PROGRAMS, QUIET, lines
from torch.distributed import TCPStore

from workers.board import Board
from workers.launcher import MESSAGE_BYTES


class Warm:
    """A launcher for all programs that take their arguments from the variable ARGS."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(120)
        config = home / "launcher.json"
        command = ["python", str(PROGRAMS / "chosen.py")]
        config.write_text(json.dumps({"framework": "pytorch", "command": command, "cwd": str(home), "shm": str(home)}))
        arguments = [sys.executable, "-P", "-m", "workers.launcher", str(theirs.fileno()), str(config)]
        self.tmp = tempfile.TemporaryDirectory(prefix="keepstep-test-")  # a short path, for sockets
        env = CLEAN | QUIET | {"TMPDIR": self.tmp.name}
        self.process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=env, start_new_session=True)
        theirs.close()
        assert self.hear()["problem"] is None
        self.generation = -1
        self._store: Any = None

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.link.recv(MESSAGE_BYTES))
        return message

    def run(
        self, shm: Path | None, world_size: int, command: str, expected: Sequence[int], restore: Any = None, **variables: str
    ) -> list[dict[str, str]]:
        """Start the ranks of ``command`` (a program's name and its arguments), wait for all, and give each one's lines; asserts the exit
        codes. A rank that outlives another's death is killed, as an agent would. ``shm`` None: no snapshots."""
        self.generation += 1
        program, args = command.split(" ", 1)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
            env = {name: str(value) for name, value in place.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "ARGS": args}
            env |= {"TORCHELASTIC_RESTART_COUNT": str(self.generation), "PROGRAM": str(PROGRAMS / program)}
            if shm is not None:
                env |= {f"KEEPSTEP_{name}": str(value) for name, value in place.items()}
                env |= {"KEEPSTEP_SNAPSHOT_EVERY": "1", "KEEPSTEP_SHM": str(shm), "KEEPSTEP_GENERATION": str(self.generation)}
                env |= {"KEEPSTEP_RESTORE": json.dumps(restore)}
                Board.create(shm / f"board-{rank}", self.generation, 0)
            self._fork(rank, env | variables)
        codes: dict[int, int] = {}
        while len(codes) < world_size:
            message = self.hear()
            if message["op"] == "exited":
                codes[message["rank"]] = message["code"]
                if message["code"] < 0 and len(codes) < world_size and expected[message["rank"]] < 0:
                    self.link.send(json.dumps({"op": "kill", "generation": self.generation}).encode())
        texts = [self.text(rank) for rank in range(world_size)]
        assert [codes[rank] for rank in range(world_size)] == list(expected), "\n".join(text[-3000:] for text in texts)
        return [lines(text) for text in texts]

    def _fork(self, rank: int, env: dict[str, str]) -> None:
        self._log(rank).unlink(missing_ok=True)
        log = os.open(self._log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        order = {"op": "rank", "rank": rank, "generation": self.generation, "env": env}
        socket.send_fds(self.link, [json.dumps(order).encode()], [log])
        os.close(log)

    def text(self, rank: int) -> str:
        """All that a rank of the last run printed."""
        return self._log(rank).read_text()

    def _log(self, rank: int) -> Path:
        return self.home / f"log-{rank}"

    def close(self) -> None:
        self.link.close()
        self.process.wait(20)
        self.tmp.cleanup()
