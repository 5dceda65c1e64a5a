"""The launcher: a warm interpreter from which ranks are forked. Run as ``python -P -m workers.launcher <socket fd> <config file>``.

Invariants: one thread, no Ray, no CUDA, no OpenMP or autograd threads, so that a fork is a clean start. It is the child subreaper of its
ranks, so every process that a rank ever makes ends up as a child here once its parents are gone, and ``end_all`` can end the whole tree
without guessing. When its socket to the agent closes, it ends all and itself: nothing outlives the agent.

While ranks run, as many reserves wait beside them and become the ranks of the next generation: the fork of an interpreter with a framework
in it, and what it does before its first step, are a large part of a restart.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.processes import os_state
from workers.rank import run_rank  # here, not after the fork: a rank would spend 15 ms of its restart on it
from workers.reserve import await_order, settle

PRELOAD: dict[str, tuple[str, ...]] = {
    "pytorch": (
        "torch",
        "torch.optim",
        "torch._dynamo",
        "torch.distributed",
        "torch.nn.parallel",
        "torch.utils.data",
        "workers.frameworks.torch",
        "workers.run",
    ),
    "tensorflow": ("tensorflow", "keras", "workers.frameworks.tensorflow", "workers.run", "workers.keras"),
    "jax": ("jax", "jax.numpy", "workers.run"),
    "plain": (),
}
MESSAGE_BYTES = 131_072  # largest message on the socket
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
RESERVE_AFTER_S = 0.3  # of calm after a launch: a reserve is forked while nobody waits for the processor
_STUCK_S = 5.0  # a killed process that is still there after this long is in the kernel's hands


@dataclass(frozen=True)
class Child:
    """What a fork is to become; returned by ``serve`` in the child only."""

    role: str  # "rank" | "reserve" | "store" | "trial"
    order: dict[str, Any]
    fd: int  # the rank's log pipe, the socket on which a reserve gets its order, the pipe on which the store says its port; -1: none


@dataclass
class Launcher:
    """The parent's view: its socket to the agent and its direct children."""

    link: socket.socket
    ranks: dict[int, int] = field(default_factory=dict)  # pid -> rank
    reserves: dict[int, socket.socket] = field(default_factory=dict)  # pid -> where it waits for its order to become a rank
    stores: dict[int, int] = field(default_factory=dict)  # pid -> generation
    trials: set[int] = field(default_factory=set)  # pids of restore tests

    def serve(self) -> Child | None:
        """Answer orders until the socket closes (None), or return in a child with what it shall be."""
        waker, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.link, selectors.EVENT_READ)
                selector.register(waker, selectors.EVENT_READ)
                return self.answer(selector, waker)
        finally:  # in a child too: a rank inherits none of it
            signal.set_wakeup_fd(-1)
            os.close(waker)
            os.close(wake_end)

    def answer(self, selector: selectors.BaseSelector, waker: int) -> Child | None:
        while True:
            lacking = len(self.reserves) < len(self.ranks)
            ready = selector.select(RESERVE_AFTER_S if lacking else None)
            if not ready and (child := self.fork_reserve()) is not None:
                return child
            for key, _ in ready:
                if key.fd == waker:
                    with contextlib.suppress(BlockingIOError):
                        os.read(waker, 4096)
                    self.reap()
                    continue
                try:
                    data, fds, _, _ = socket.recv_fds(self.link, MESSAGE_BYTES, 4)
                except ConnectionResetError:  # the agent died with our words unread
                    data = b""
                if not data:
                    self.end_all(keep_stores_after=None)
                    return None
                child = self.obey(json.loads(data), fds)
                if child is not None:
                    return child

    def obey(self, order: dict[str, Any], fds: list[int]) -> Child | None:
        match order["op"]:
            case "rank":
                return self.fork_rank(order, fds[0])
            case "store":
                return self.fork_store(order)
            case "trial":
                return self.fork_trial(order)
            case "kill":
                stuck = self.end_all(keep_stores_after=order["generation"])
                self.say(op="killed", generation=order["generation"], stuck=stuck)
        return None

    def fork_rank(self, order: dict[str, Any], log: int) -> Child | None:
        """A reserve becomes the rank at once; without one the fork costs its tens of milliseconds now."""
        pid = self.call_reserve(order, log) or os.fork()
        if pid == 0:
            self.forget_reserves()
            return Child("rank", order, log)
        os.close(log)
        self.ranks[pid] = order["rank"]
        self.say(op="forked", rank=order["rank"], generation=order["generation"], pid=pid)
        return None

    def fork_reserve(self) -> Child | None:
        like = next(iter(self.ranks))
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
        with there:
            try:
                pid = os.fork()
            except OSError:  # no memory or no process to spare: the restart will fork, as far as it can
                here.close()
                return None
            if pid == 0:
                here.close()
                self.forget_reserves()
                return Child("reserve", {"like": like}, there.detach())
        self.reserves[pid] = here
        return None

    def call_reserve(self, order: dict[str, Any], log: int) -> int | None:
        """Pid of the reserve that has got the order; None: there is none."""
        while self.reserves:
            pid, its = self.reserves.popitem()
            if os_state(pid) in ("T", "t"):  # it would take the order when somebody lets it go on
                its.close()
                os.kill(pid, signal.SIGKILL)
                continue
            with its, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # killed, and not yet collected
                socket.send_fds(its, [json.dumps(order).encode()], [log])
                return pid
        return None

    def forget_reserves(self) -> None:
        """In a child: nothing of the launcher's is left open in a rank."""
        for its in self.reserves.values():
            its.close()
        self.reserves.clear()

    def fork_store(self, order: dict[str, Any]) -> Child | None:
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(here)
            self.forget_reserves()
            return Child("store", order, there)
        os.close(there)
        self.stores[pid] = order["generation"]
        with os.fdopen(here, "rb") as answer:  # a few ms: the fork listens on port 0 and says which it got
            port = int(answer.readline() or b"0")
        self.say(op="store", generation=order["generation"], port=port)
        return None

    def fork_trial(self, order: dict[str, Any]) -> Child | None:
        pid = os.fork()
        if pid == 0:
            self.forget_reserves()
            return Child("trial", order, -1)
        self.trials.add(pid)
        return None

    def reap(self) -> None:
        """Collect every child that ended; adopted orphans too, so that no zombie stays. One of ours that was stopped is ended: who waits
        for it would wait for ever. A stopped rank is a hang, which others judge."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                if pid in self.stores or pid in self.reserves or pid in self.trials:
                    os.kill(pid, signal.SIGKILL)
                continue
            if pid in self.ranks:
                rank = self.ranks.pop(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # data loader workers and other children end with their rank
                self.say(op="exited", rank=rank, pid=pid, at=time.time(), code=os.waitstatus_to_exitcode(status))
            if pid in self.reserves:
                self.reserves.pop(pid).close()
            if pid in self.trials:
                self.trials.remove(pid)
                self.say(op="trial_ended", code=os.waitstatus_to_exitcode(status))
            generation = self.stores.pop(pid, None)
            if generation is not None:
                self.say(op="store_ended", generation=generation)

    def end_all(self, keep_stores_after: int | None) -> list[int]:
        """SIGKILL every descendant but reserves and the stores of generations after ``keep_stores_after`` (None: those too).

        Returns pids that would not go.
        """
        deadline = time.monotonic() + _STUCK_S
        for pid in list(self.ranks):
            with contextlib.suppress(ProcessLookupError):  # a fork that has not made its session yet is ended by its pid below
                os.killpg(pid, signal.SIGKILL)
        while True:
            kept: set[int] = set()
            if keep_stores_after is not None:
                kept = {p for p, g in self.stores.items() if g > keep_stores_after} | set(self.reserves)
            left = [pid for pid in _children() if pid not in kept]
            if not left or time.monotonic() > deadline:
                return left
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.001)

    def say(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.send(json.dumps(message).encode())


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """SIGKILL for this process when ``parent`` ends; at once if it has ended already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def preload(framework: str) -> str | None:
    """Import what the framework's ranks need; a sentence when that fails."""
    for name in PRELOAD[framework]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a missing library is an OSError, a wrong build a RuntimeError
            extra = framework.replace("pytorch", "torch")
            return f"cannot import {name} for framework {framework}: {error}; install keepstep[{extra}] on this node"
    return None


def serve_store(order: dict[str, Any], answer: int) -> None:
    """Serve one generation's rendezvous store until killed. It listens before any rank starts: no rank waits in a connect back-off."""
    from torch.distributed import TCPStore

    store = TCPStore(order["host"], 0, is_master=True, wait_for_workers=False)
    os.write(answer, f"{store.port}\n".encode())
    os.close(answer)
    while True:
        signal.pause()


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    config = json.loads(Path(sys.argv[2]).read_text())
    become_subreaper()  # it ends when the agent lets go of the socket, by its death at the latest, and first all that is below it
    started = time.monotonic()
    gc.disable()  # imports make much and drop little: collecting meanwhile costs a fifth of their time
    problem = preload(config["framework"])
    gc.collect()
    gc.freeze()  # forks share these pages; the collector must not touch them
    gc.enable()
    launcher = Launcher(link)
    launcher.say(op="ready", seconds=time.monotonic() - started, problem=problem)
    parent = os.getpid()
    child = launcher.serve()
    if child is None:
        os._exit(0)  # nothing is left to do, and an interpreter with a framework in it takes long to tear down
    # Only a child gets here, with the stack of the parent's loop unwound.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link.close()
    die_with(parent)
    if child.role == "reserve":
        settle(child.order["like"])
        order = await_order(child.fd, MESSAGE_BYTES)
        if order is None:
            os._exit(0)
        child = Child("rank", *order)
    if child.role == "store":
        os.setsid()
        serve_store(child.order, child.fd)
    if child.role == "trial":
        from workers.checkpoint.trial import run_trial

        run_trial(config, child.order)
        return
    sys.exit(run_rank(config, child.order, child.fd))


if __name__ == "__main__":
    main()
