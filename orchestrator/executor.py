"""Do: the work that follows what was saved.

Invariants: nothing is begun without the lease, and every call carries its fence; every action is idempotent and may fail; it is decided
again on a later pass. Nobody waits for an action, and a group never has two of them under way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from orchestrator.core.actions import Action, CreateGroup, EndGroup, RemoveGroup
from orchestrator.ports import Groups, LeaseLost, Unavailable

_log = logging.getLogger(__name__)
Key = tuple[str, int]
Submit = Callable[[Callable[[], bool]], "Future[bool]"]


class Executor:
    """``require`` gives the fence of the lease or raises LeaseLost. ``submit`` is that of a thread pool. ``wake`` is set when a removal is
    complete, since another placement may wait for it."""

    def __init__(self, groups: Groups, require: Callable[[], int], submit: Submit, wake: threading.Event) -> None:
        self._groups, self._require, self._submit, self._wake = groups, require, submit, wake
        self._under_way: dict[Key, tuple[Action, Future[bool]]] = {}
        self.errors = 0

    def start(self, actions: Iterable[Action]) -> None:
        """Begins them; one for a group that has another under way is left out."""
        for action in actions:
            key = _key(action)
            if key not in self._under_way:
                future = self._submit(partial(self._do, action))
                self._under_way[key] = (action, future)
                if isinstance(action, RemoveGroup):
                    future.add_done_callback(self._removed)

    def collect(self) -> tuple[frozenset[Key], dict[Key, str]]:
        """Of what has finished since the last call: groups whose removal is complete, and why others could not be removed."""
        removed: set[Key] = set()
        problems: dict[Key, str] = {}
        for key, (action, future) in list(self._under_way.items()):
            if not future.done():
                continue
            del self._under_way[key]
            problem = self._problem(action, future)
            if isinstance(action, RemoveGroup) and problem is not None:
                problems[key] = problem
            elif isinstance(action, RemoveGroup):
                removed.add(key)
        return frozenset(removed), problems

    def _problem(self, action: Action, future: Future[bool]) -> str | None:
        """One line that tells why the action must be repeated."""
        error = future.exception()
        if error is None:
            return None if future.result() else "Ray still shows actors or the placement group of it"
        name = f"{type(action).__name__} {'.'.join(map(str, _key(action)))}"
        if isinstance(error, Unavailable | LeaseLost):
            _log.warning("%s: %s; tried again on a later pass", name, error)
            return str(error)
        self.errors += 1
        _log.error("%s failed; tried again on a later pass", name, exc_info=error)
        return f"{type(error).__name__}: {error}".splitlines()[0]

    def _do(self, action: Action) -> bool:
        """False where it was not completed."""
        fence = self._require()  # it may have waited for a thread
        match action:
            case CreateGroup(spec):
                self._groups.create(spec, fence)
            case EndGroup(job_id, attempt, grace_s):
                self._groups.end(job_id, attempt, grace_s, fence)
            case RemoveGroup(job_id, attempt):
                return self._groups.remove(job_id, attempt, fence)
        return True

    def _removed(self, future: Future[bool]) -> None:
        if not future.cancelled() and future.exception() is None and future.result():
            self._wake.set()


def _key(action: Action) -> Key:
    return (action.spec.job_id, action.spec.attempt) if isinstance(action, CreateGroup) else (action.job_id, action.attempt)
