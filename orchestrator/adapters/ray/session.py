"""The one connection of this process to Ray, and calls over it that end in time.

Invariants: a call to Ray returns, raises its own error, or raises Unavailable within its limit, whatever Ray does; this process outlives a
Ray that is gone for hours; nothing here reads or writes the files by which Ray finds "the current cluster".
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from orchestrator.ports import Unavailable

NAMESPACE = "keepstep"
CONNECT_S = 30.0
CALL_S = 5.0

T = TypeVar("T")
_connecting = threading.Lock()
_connected_to: str | None = None
_room = threading.BoundedSemaphore(32)  # calls under way; those that hang keep their place until Ray lets them go


def ray_environment(token: str | None) -> dict[str, str]:
    """What the processes of a cluster and its drivers must have alike in their environment, before they import Ray."""
    settings = {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_worker_niceness": "0",  # Ray's workers, and so our agents and ranks, would yield to everything else on the node
    }
    if token is None:
        return settings
    # The last one makes Ray take 127.0.0.1 for what it says instead of looking for the address of a network card.
    return settings | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def connect(address: str, token: str | None = None) -> None:
    """Connects this process to the cluster at ``address`` (host:port); does nothing when it is. Raises Unavailable within CONNECT_S.

    ``token``: of the embedded cluster; None for another one, whose token comes from RAY_AUTH_TOKEN or Ray's own files.
    """
    global _connected_to
    with _connecting:
        if _connected_to == address:
            return
        _knock(address)
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.update(ray_environment(token))
        # Without this Ray ends a driver, by abort(), that has not seen its cluster for a minute.
        os.environ.update({"RAY_gcs_rpc_server_reconnect_timeout_s": str(10 * 365 * 24 * 3600)})
        import ray
        from ray._private import worker
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        worker._worker_logs_enabled = False  # what nodes and workers say is in their logs, not on the server's terminal
        if ray.is_initialized():
            answer(ray.shutdown, CONNECT_S)
            _connected_to = None
        AuthenticationTokenLoader.instance().reset_cache()  # it keeps the first token for ever
        answer(lambda: ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error"), CONNECT_S)
        _connected_to = address


def disconnect() -> None:
    """Ends the connection; detached actors stay."""
    global _connected_to
    with _connecting:
        if _connected_to is not None:
            import ray

            answer(ray.shutdown, CONNECT_S)
            _connected_to = None


def answer(call: Callable[[], T], limit_s: float = CALL_S) -> T:
    """What ``call`` returns or raises, if it does within ``limit_s``; else Unavailable, and the call is left to itself."""
    result: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            result.put((call(), None))
        except BaseException as error:
            result.put((None, error))
        finally:
            _room.release()

    if not _room.acquire(timeout=limit_s):
        raise Unavailable("ray: too many calls are still waiting for an answer")
    threading.Thread(target=work, name="ray-call", daemon=True).start()
    try:
        value, error = result.get(timeout=limit_s)
    except Empty:
        raise Unavailable(f"ray: no answer within {limit_s:g} s") from None
    if error is not None:
        raise _told(error) from error
    return value  # type: ignore[return-value]


def _told(error: BaseException) -> BaseException:
    """Unavailable for errors of the way to Ray; others as they are, also a GetTimeoutError: it tells about an actor."""
    from ray.exceptions import AuthenticationError, GetTimeoutError, RaySystemError, RpcError

    of_the_way = (ConnectionError, TimeoutError, AuthenticationError, RaySystemError, RpcError)
    if isinstance(error, of_the_way) and not isinstance(error, GetTimeoutError):
        return Unavailable(f"ray: {type(error).__name__}: {error}".splitlines()[0])
    return error


def _knock(address: str) -> None:
    """Ray's own attempt to connect to nobody takes a minute and cannot be stopped."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError as error:
        raise Unavailable(f"ray: nothing answers at {address}: {error}") from error
