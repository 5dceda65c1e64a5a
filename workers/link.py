"""The agent's end of a launcher: its process, and the socket over which orders go and answers come.

Invariant: ``ended`` is called once for each start, when the launcher has closed its end, which it does at its death at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.launcher import MESSAGE_BYTES


class Link:
    """``heard`` gets each message, ``ended`` the exit code of the launcher."""

    def __init__(self, heard: Callable[[dict[str, Any]], None], ended: Callable[[int], None]) -> None:
        self._heard, self._ended = heard, ended
        self._socket: socket.socket | None = None
        self._gone = asyncio.Event()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def lives(self) -> bool:
        return self._socket is not None

    def start(self, config: Path, command: dict[str, Any], env: dict[str, str], errors: Path) -> None:
        """Start the warm interpreter in ``command["cwd"]``. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
        ours.setblocking(False)
        config.touch(mode=0o600)
        config.write_text(json.dumps(command))
        with theirs, errors.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.launcher", str(theirs.fileno()), str(config)],
                pass_fds=[theirs.fileno()],
                env=env,
                cwd=command["cwd"],
                stdin=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        self._socket = ours
        self._gone.clear()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear)

    def say(self, fds: tuple[int, ...] = (), **order: Any) -> None:
        """Raises ConnectionError when the launcher is gone."""
        if self._socket is None:
            raise ConnectionError("the launcher is gone")
        socket.send_fds(self._socket, [json.dumps(order).encode()], list(fds))

    async def kill(self, wait_s: float) -> list[int]:
        """End a launcher that does not answer, stopped or stuck: all below it die with it. Returns it where it would not go."""
        process = self.process
        assert process is not None
        process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), wait_s)
        return [process.pid] if self.lives and self.process is process else []

    def close(self) -> None:
        """Let go of the launcher, which ends it and everything below it, and wait for that."""
        self._forget()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            self.process.wait()

    def _hear(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._heard(json.loads(data))
                continue
            assert self.process is not None
            self._forget()
            self.process.kill()
            self._ended(self.process.wait())

    def _forget(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._gone.set()
