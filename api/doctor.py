"""Looks at what a server on this machine needs and says what is wrong and what helps. Changes nothing but a probe file in the storage.

Each check stands alone: what one finds never hides the others. A check that cannot be made says so, and is a problem.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from api import server_record
from orchestrator.ports import Unavailable
from orchestrator.settings import TOKEN_FILE, Settings

GIB = 1024**3
LEAST_SHM = 1 * GIB
LEAST_DISK = 5 * GIB
LEAST_FILES = 4096
CONNECT_S = 3.0
CLOCK_S = 2.0
FRAMEWORKS = ("torch", "tensorflow", "jax")


@dataclass(frozen=True)
class Finding:
    """``remedy`` is set where ``ok`` is False."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


class Problem(Exception):
    """What a check has found wrong, and what helps."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


def examine(settings: Settings) -> list[Finding]:
    """All findings, in the order of ``CHECKS``."""
    return [_find(name, check, settings) for name, check in CHECKS.items()]


def _find(name: str, check: Callable[[Settings], str], settings: Settings) -> Finding:
    try:
        return Finding(name, True, check(settings))
    except Problem as problem:
        return Finding(name, False, str(problem), problem.remedy)
    except Exception as error:  # whatever a file system, a driver or a cluster raises
        return Finding(name, False, f"cannot be checked: {type(error).__name__}: {error}", "see the message; server.log may tell more")


def _versions(_: Settings) -> str:
    found = []
    for name in ("keepstep", "ray", *FRAMEWORKS):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    told = f"Python {sys.version.split()[0]}, {', '.join(found)}"
    if not any(f.split()[0] in FRAMEWORKS for f in found):
        raise Problem(f"{told}: no framework", "install keepstep[torch] or keepstep[tensorflow] on the nodes that train")
    return told


def _state_folder(settings: Settings) -> str:
    folder = settings.state_dir
    if not folder.exists():
        return f"{folder} will be made by `keepstep up`"
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Problem(f"{folder} cannot be written", "give its user the right to, or choose another with --state-dir")
    token = folder / TOKEN_FILE
    if token.exists() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        raise Problem(f"{token} can be read by others", f"chmod 600 {token}; if others may have read it, remove it and restart")
    return str(folder)


def _database(settings: Settings) -> str:
    from sqlalchemy import make_url

    from orchestrator.adapters.db.engine import open_engine
    from orchestrator.adapters.db.schema import pending

    url = make_url(settings.database_url)
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        return f"{shown} will be made by `keepstep up`"
    engine = open_engine(url)
    try:
        began = time.perf_counter()
        missing = pending(engine)
        took = (time.perf_counter() - began) * 1000
    except Unavailable as error:
        raise Problem(f"{shown}: {error}", "start the database, or set KEEPSTEP_DATABASE_URL right") from error
    finally:
        engine.dispose()
    if missing:
        raise Problem(f"{shown}: its schema lacks revisions {', '.join(missing)}", "run `keepstep db upgrade`")
    return f"{shown} answers in {took:.0f} ms, its schema is current"


def _cluster(settings: Settings) -> str:
    address = settings.ray_address
    if address is None:
        from orchestrator.adapters.ray import daemon

        cluster = daemon.find(settings.state_dir)
        if cluster is None:
            return "no embedded cluster runs; `keepstep up` starts one"
        return f"embedded, {cluster.nodes} nodes at {cluster.address}"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            return f"{address} takes connections"
    except (OSError, ValueError) as error:
        raise Problem(f"nothing answers at {address}: {error}", "start Ray there, or set KEEPSTEP_RAY_ADDRESS to its head") from error


def _storage(settings: Settings) -> str:
    from workers.checkpoint.storage import open_folder

    if "://" not in settings.storage and not Path(settings.storage).exists():
        return f"{settings.storage} will be made by `keepstep up`"
    folder = open_folder(settings.storage)
    name, content = f".doctor-{secrets.token_hex(4)}", secrets.token_bytes(4096)
    began = time.perf_counter()
    try:
        folder.write(name, [content])
        if b"".join(folder.read(name)) != content:
            raise Problem(f"{settings.storage} gave other bytes than were written", "do not keep checkpoints there")
    except OSError as error:
        raise Problem(f"{settings.storage}: {error}", "make it writable for this user, or set KEEPSTEP_STORAGE to another place") from error
    finally:
        folder.remove(name)
    took = (time.perf_counter() - began) * 1000
    if "://" in settings.storage:
        return f"{settings.storage} writes and reads back 4 KiB in {took:.0f} ms"
    free = shutil.disk_usage(settings.storage).free
    if free < LEAST_DISK:
        raise Problem(f"{settings.storage} has {free / GIB:.1f} GiB free", f"keep {LEAST_DISK // GIB} GiB and some checkpoints' worth free")
    return f"{settings.storage} writes and reads back in {took:.0f} ms, {free / GIB:.0f} GiB free"


def _shared_memory(_: Settings) -> str:
    room = shutil.disk_usage("/dev/shm")
    told = f"/dev/shm has {room.free / GIB:.1f} of {room.total / GIB:.1f} GiB free"
    if room.total < LEAST_SHM:
        raise Problem(told, "snapshots need two to three copies of a node's training state: give the container --shm-size or more memory")
    if room.free < room.total / 10:
        raise Problem(told, "see what fills it with `du -sh /dev/shm/*`; folders under /dev/shm/keepstep belong to groups that run")
    return told


def _server(settings: Settings) -> str:
    record = server_record.read(settings.state_dir)
    if record is None:
        return "no server runs on this state folder; `keepstep up` starts one"
    try:
        answer = httpx.get(f"{record.address}/readyz", timeout=CONNECT_S, trust_env=False)
        told = str(answer.json()["detail"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise Problem(
            f"{record.address} does not answer: {error}", "see server.log; if it is gone, `keepstep up` starts a new one"
        ) from error
    if answer.status_code != httpx.codes.OK:
        raise Problem(f"{record.address} is not ready: {told}", "see server.log")
    return f"{record.address} is ready: {told}"


def _port(settings: Settings) -> str:
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            record = server_record.read(settings.state_dir)
            if record is not None and urlsplit(record.address).port == settings.port:
                return f"the server of this state folder listens at {settings.host}:{settings.port}"
            raise Problem(f"{settings.host}:{settings.port}: {error.strerror}", "choose another with --port, 0 takes a free one") from error
    return f"{settings.host}:{settings.port} is free"


def _clock(settings: Settings) -> str:
    """Times of a PostgreSQL server that keeps another time would not fit those of nodes."""
    if settings.database_url.startswith("sqlite"):
        return "one clock: SQLite has none of its own"
    from sqlalchemy import text

    from orchestrator.adapters.db.engine import open_engine, reading

    engine = open_engine(settings.database_url)
    try:
        with reading(engine) as connection:
            ahead = float(connection.execute(text("SELECT EXTRACT(EPOCH FROM clock_timestamp())")).scalar_one()) - time.time()
    finally:
        engine.dispose()
    if abs(ahead) > CLOCK_S:
        raise Problem(f"the database's clock is {ahead:+.1f} s off this machine's", "let NTP or chrony set both")
    return f"the database's clock is {ahead:+.2f} s off this machine's"


def _open_files(_: Settings) -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < LEAST_FILES:
        raise Problem(f"a process may open {limit} files", f"raise it to {LEAST_FILES} or more: `ulimit -n 65536`")
    return f"a process may open {limit} files"


CHECKS: dict[str, Callable[[Settings], str]] = {
    "versions": _versions,
    "state folder": _state_folder,
    "database": _database,
    "cluster": _cluster,
    "storage": _storage,
    "shared memory": _shared_memory,
    "server": _server,
    "port": _port,
    "clock": _clock,
    "open files": _open_files,
}
