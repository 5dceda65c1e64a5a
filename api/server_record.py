"""How a server on this machine is found, and how a second one on the same state folder is kept out.

``server.lock`` is held by a running server for as long as it lives, so the kernel itself tells whether there is one; ``server.json`` says
where it listens. Invariant: a process is ended only when pid and start time are those that the record names.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from orchestrator.settings import SettingsError, state_folder, stored_token

RECORD = "server.json"
LOCK = "server.lock"
HOW_TO_START = "start it with `keepstep up`, or name another with --state-dir or KEEPSTEP_SERVER and KEEPSTEP_TOKEN"


class ServerDown(Exception):
    """No server answers. ``nothing_listens``: it is not there at all, so that trying again at once is of no use."""

    def __init__(self, what: str, nothing_listens: bool = True) -> None:
        super().__init__(f"{what}; {HOW_TO_START}")
        self.what = what
        self.nothing_listens = nothing_listens


@dataclass(frozen=True)
class ServerRecord:
    """A running server: base URL, process id, and the start time of that process in Unix seconds."""

    address: str
    pid: int
    started_at: float


@contextmanager
def only_server(folder: Path) -> Iterator[None]:
    """Hold the lock of a state folder. Raises SettingsError when another server holds it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            record = read(folder)
            where = f" at {record.address} (process {record.pid})" if record else ""
            raise SettingsError(f"a server{where} already uses the state folder {folder}; choose another with --state-dir") from None
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """True while a server lives on this state folder."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def announced(folder: Path, address: str) -> Iterator[None]:
    """Tell this process's address for as long as the context lasts. Needs the lock."""
    record = ServerRecord(address, os.getpid(), psutil.Process().create_time())
    fresh = folder / f"{RECORD}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(record)))
    fresh.replace(folder / RECORD)
    try:
        yield
    finally:
        (folder / RECORD).unlink(missing_ok=True)


def read(folder: Path) -> ServerRecord | None:
    """The record of the last server that did not end cleanly, or of the one that runs; None: there is none."""
    try:
        values = json.loads((folder / RECORD).read_text())
        return ServerRecord(str(values["address"]), int(values["pid"]), float(values["started_at"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def process_of(record: ServerRecord) -> psutil.Process | None:
    """The process that wrote the record, if it still lives."""
    try:
        process = psutil.Process(record.pid)
        return process if abs(process.create_time() - record.started_at) < 1.0 else None
    except psutil.NoSuchProcess:
        return None


def find(state_dir: Path | None) -> tuple[str, str]:
    """(address, token): KEEPSTEP_SERVER and KEEPSTEP_TOKEN, else what the state folder holds. Raises ServerDown, SettingsError."""
    folder = state_folder(state_dir)
    address = os.environ.get("KEEPSTEP_SERVER", "").rstrip("/")
    if address and (urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname):
        raise SettingsError(f"KEEPSTEP_SERVER: {address!r} must be a URL such as http://127.0.0.1:8765")
    if not address:
        record = read(folder)
        if record is None or process_of(record) is None:
            raise ServerDown(f"no server runs on the state folder {folder}")
        address = record.address
    token = os.environ.get("KEEPSTEP_TOKEN") or stored_token(folder)
    if not token:
        raise SettingsError(f"no token: {folder} holds none and KEEPSTEP_TOKEN is not set")
    return address, token
