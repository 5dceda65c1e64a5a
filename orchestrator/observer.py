"""See: reads everything that a plan is made from, without holding a transaction while the network answers.

Invariant: what did not answer is told as unknown, never as absent.
"""

from __future__ import annotations

import logging

from orchestrator.core.model import Attempt, GroupView, Job, Node, Presence, World
from orchestrator.core.states import AttemptState
from orchestrator.ports import Groups, Nodes, Store, Unavailable

_log = logging.getLogger(__name__)
Key = tuple[str, int]


class Observer:
    def __init__(self, store: Store, groups: Groups, nodes: Nodes) -> None:
        self._store, self._groups, self._nodes = store, groups, nodes

    def world(self, fence: int | None, removed: frozenset[Key] = frozenset(), problems: dict[Key, str] | None = None) -> World:
        """``fence``: of this server where it leads, None where it only looks. ``removed``: groups whose removal was complete before this
        call; ``problems``: why the removal of others failed.

        Raises Unavailable when the database does not answer, LeaseLost when a coordinator follows another server.
        """
        jobs, attempts = self._store.open_jobs()
        live = [(a.job_id, a.number) for a in attempts.values() if a.state is not AttemptState.ENDED]
        views = self._views(live, fence)
        nodes = self._seen_nodes()
        strays = self._strays({job.id: job for job in jobs}, attempts)
        return World(tuple(jobs), attempts, views, nodes, removed=removed, removal_problems=problems or {}, strays=strays)

    def _views(self, keys: list[Key], fence: int | None) -> dict[Key, GroupView]:
        try:
            views = self._groups.observe(keys, fence) if keys else {}
        except Unavailable as error:
            _log.warning("groups cannot be seen: %s", error)
            views = {}
        return {key: views.get(key, GroupView(Presence.UNKNOWN)) for key in keys}

    def _seen_nodes(self) -> tuple[Node, ...] | None:
        try:
            return self._nodes.nodes()
        except Unavailable as error:
            _log.warning("nodes cannot be seen: %s", error)
            return None

    def _strays(self, jobs: dict[str, Job], attempts: dict[str, Attempt]) -> frozenset[Key]:
        """Groups in Ray whose attempt has ended: a call that was late made or kept them. Jobs unknown here are another server's."""
        try:
            existing = self._groups.existing()
        except Unavailable:
            return frozenset()
        return frozenset(key for key in existing if self._is_stray(key, jobs, attempts))

    def _is_stray(self, key: Key, jobs: dict[str, Job], attempts: dict[str, Attempt]) -> bool:
        job_id, number = key
        job = jobs.get(job_id)
        if job is None:
            try:
                closed = self._store.job(job_id)
            except ValueError as error:
                _log.error("job %s: its row cannot be read, so its group is left alone: %s", job_id, error)
                return False
            return closed is not None and closed.id == job_id and closed.state.final and number <= closed.attempt
        newest = attempts.get(job_id)
        return number < job.attempt or (newest is not None and number == newest.number and newest.state is AttemptState.ENDED)
