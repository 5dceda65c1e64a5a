"""Do: the work that follows what was saved. Invariant: every action is idempotent and may fail; it is decided again on the next pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from orchestrator.core.actions import Action, CreateGroup, EndGroup, RemoveGroup
from orchestrator.ports import Groups, Unavailable

_log = logging.getLogger(__name__)
Key = tuple[str, int]
Each = Callable[[Callable[[Action], Key | None], Iterable[Action]], Iterator[Key | None]]


class Executor:
    """``each`` is ``map`` or the ``map`` of a thread pool, so that a slow call for one job does not hold up the others."""

    def __init__(self, groups: Groups, each: Each = map) -> None:
        self._groups, self._each = groups, each
        self.errors = 0

    def run(self, actions: Iterable[Action]) -> frozenset[Key]:
        """Does them all; returns the groups whose removal is complete."""
        return frozenset(key for key in self._each(self._one, actions) if key is not None)

    def _one(self, action: Action) -> Key | None:
        try:
            return self._do(action)
        except Unavailable as error:
            _log.warning("%s: %s; tried again on the next pass", _name(action), error)
        except Exception:
            self.errors += 1
            _log.exception("%s failed; tried again on the next pass", _name(action))
        return None

    def _do(self, action: Action) -> Key | None:
        match action:
            case CreateGroup(spec):
                self._groups.create(spec)
            case EndGroup(job_id, attempt, grace_s):
                self._groups.end(job_id, attempt, grace_s)
            case RemoveGroup(job_id, attempt):
                return (job_id, attempt) if self._groups.remove(job_id, attempt) else None
        return None


def _name(action: Action) -> str:
    job_id, attempt = (action.spec.job_id, action.spec.attempt) if isinstance(action, CreateGroup) else (action.job_id, action.attempt)
    return f"{type(action).__name__} {job_id}.{attempt}"
