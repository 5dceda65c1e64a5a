"""Holds the lease for one server: takes it when it is free, renews it, and tells at any moment whether this server may act.

Invariants: ``fence`` is None unless this server took the lease and renewed it within ``HOLD_S``; the age of a renewal counts from before it
was asked for. A server that slept wakes up without a fence. ``sole``: the database has no other server (SQLite under its lock), so the
lease is taken at once and needs no beats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from orchestrator.core.lease import BEAT_S, HOLD_S, Lease, Watch, free, watch
from orchestrator.ports import LeaseLost, Leases, Unavailable

_log = logging.getLogger(__name__)
STUCK_S = 60.0  # a pass that lasts longer does not count as life: the lease goes to a server that works


class Leadership:
    def __init__(
        self,
        leases: Leases,
        holder: str,
        cluster: str,
        wake: threading.Event,
        *,
        sole: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``holder`` names this server for people; ``wake`` is set when it begins to lead, or may act again."""
        self._leases, self._holder, self._cluster, self._wake = leases, holder, cluster, wake
        self._sole, self._monotonic = sole, monotonic
        self._mine: Lease | None = None
        self._renewed_at = 0.0
        self._watched: Watch | None = None
        self._pass_began: float | None = None
        self._passed_at: float | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = 0  # leases of this server that another one took

    @property
    def fence(self) -> int | None:
        """The fencing token of this server while it leads."""
        mine = self._mine
        if mine is None or not (self._sole or self._monotonic() - self._renewed_at < HOLD_S):
            return None
        return mine.fence

    def require(self) -> int:
        """The fencing token. Raises LeaseLost where this server does not lead now."""
        fence = self.fence
        if fence is None:
            raise LeaseLost("this server does not lead now")
        return fence

    def pass_begins(self) -> None:
        self._pass_began = self._monotonic()

    def pass_ends(self, at: float | None) -> None:
        """``at``: when the newest complete one ended, Unix seconds; None: there was none."""
        self._pass_began, self._passed_at = None, at

    def drop(self, fence: int) -> None:
        """Somebody refused this fence: another server leads."""
        mine = self._mine
        if mine is not None and mine.fence == fence:
            self._mine, self._watched = None, None
            self.lost += 1
            _log.warning("the lease %d of this server is over: another one leads", fence)

    def beat(self) -> None:
        """Renews the lease, or takes it where it is free. Raises Unavailable."""
        mine, began = self._mine, self._monotonic()
        if mine is None:
            self._take(began)
        elif not self._sole and not self._stuck(began):
            renewed = self._leases.renew(mine, self._passed_at)
            if renewed is None:
                self.drop(mine.fence)
            else:
                held = self.fence is not None
                self._mine, self._renewed_at = renewed, began
                if not held:  # the database was away
                    self._wake.set()

    def _take(self, now: float) -> None:
        self._watched = watch(self._watched, self._leases.lease(), now)
        if not (self._sole or free(self._watched, self._cluster, now)):
            return
        taken = self._leases.take(self._watched.lease, self._holder, self._cluster)
        if taken is not None:
            self._passed_at = None
            self._mine, self._renewed_at, self._watched = taken, now, None
            _log.info("this server leads, with lease %d", taken.fence)
            self._wake.set()

    def _stuck(self, now: float) -> bool:
        began = self._pass_began
        return began is not None and now - began > STUCK_S

    def start(self) -> None:
        """Beats in a thread until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="keepstep-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Gives the lease back, so that another server leads at once. Call it when the reconciler has stopped."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(HOLD_S)
        mine, self._mine = self._mine, None
        if mine is not None:
            try:
                self._leases.release(mine.fence)
            except Unavailable as error:
                _log.warning("the lease was not given back, it ends by itself: %s", error)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.beat()
            except Unavailable as error:
                _log.warning("the lease cannot be seen or renewed: %s", error)
            except Exception:
                _log.exception("a beat of the lease failed")
            self._stopping.wait(BEAT_S)
