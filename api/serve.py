"""Runs the server in the foreground: lock, socket, control plane, HTTP.

Invariants: one server per state folder; its address is announced only when it can answer; SIGINT and SIGTERM end the server in order and
nothing else; streams that clients follow do not hold up the end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import logging.handlers
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import uvicorn

from api import server_record
from api.app import create_app
from api.context import Context
from orchestrator import bootstrap
from orchestrator.bootstrap import Control
from orchestrator.settings import Settings, SettingsError, access_token, prepare_state_dir

SWITCH_S = 0.001
DRAIN_S = 2  # for answers under way; a followed log is cut then
LOG_BYTES = 10 * 1024**2


class Stop(BaseException):
    """A signal asked for the end before the server was up."""


class _Server(uvicorn.Server):
    """Calls ``ready`` when it answers; leaves signals to ``_signals``."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


def serve(settings: Settings, nodes: int | None, gpus_per_node: int, ready: Callable[[str], None]) -> None:
    """Serve until a signal comes; ``ready`` gets the address. Raises SettingsError, Unavailable."""
    prepare_state_dir(settings.state_dir)
    servers: list[_Server] = []
    with ExitStack() as stack:
        stack.enter_context(server_record.only_server(settings.state_dir))
        stack.enter_context(_signals(servers))
        listener = stack.enter_context(_listening(settings))
        _log_to_file(settings)
        token = access_token(settings)
        address = _address(settings.host, listener)
        control = stack.enter_context(bootstrap.running(settings, nodes, gpus_per_node))
        stack.enter_context(_signals(servers))  # again: connecting to Ray put a handler in their place that prints a crash report

        def answering() -> None:
            stack.enter_context(server_record.announced(settings.state_dir, address))
            ready(address)

        app = create_app(context_of(control), token)
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN_S, server_header=False)
        servers.append(_Server(config, answering))
        stay_responsive()
        asyncio.run(servers[0].serve(sockets=[listener]))


def stay_responsive() -> None:
    """For a process that answers while its reconciler computes: called once, when everything is built."""
    # What is here now stays: to look through it again took the garbage collector 70 ms each time, in the middle of some answer.
    gc.collect()
    gc.freeze()
    # An answer passes the interpreter's lock a dozen times, and each time waits so long for a reconciler that computes.
    sys.setswitchinterval(SWITCH_S)


def context_of(control: Control) -> Context:
    """What the routes need of a control plane."""
    return Context(
        service=control.service, bundles=control.bundles, logs_of=control.logs_of, ping=control.store.ping,
        work=lambda: control.reconciler.work, last_pass_at=control.last_pass_at, figures=control.store.figures, now=control.clock.now,
    )  # fmt: skip


@contextmanager
def _signals(servers: list[_Server]) -> Iterator[None]:
    """The first SIGINT or SIGTERM lets the server end in order; before there is one, it ends the start."""

    def stop(*_: object) -> None:
        if not servers:
            raise Stop
        servers[0].should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """Bound before anything is started, so that a taken port costs nothing. Raises SettingsError."""
    try:
        family, _, _, _, place = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingsError(
            f"port: cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another with --port, 0 takes a free one"
        ) from error
    with listener:
        yield listener


def _address(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _log_to_file(settings: Settings) -> None:
    handler = logging.handlers.RotatingFileHandler(settings.state_dir / "server.log", maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
