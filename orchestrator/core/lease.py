"""Who may act: the lease of the one reconciler that leads, as rules. PURE.

Invariants: no clocks of two machines are compared, a lease is over when its beats stand still for ``LEASE_S`` by the watcher's own steady
clock; a leader trusts itself for less than that; whoever takes the lease gets a higher fence (fencing token), and what comes with a lower
one is refused by the database and by coordinators. So safety never rests on time, only how soon another one takes over does.
"""

from __future__ import annotations

from dataclasses import dataclass

BEAT_S = 0.5  # between two renewals, and between two looks of one that waits
HOLD_S = 2.0  # a leader that could not renew for this long does nothing until it has
LEASE_S = 3.0  # beats that stand still for this long are those of a leader that is gone


@dataclass(frozen=True)
class Lease:
    """The row that all servers share. ``fence`` grows with every leader; ``holder``: who leads, None: nobody; ``cluster``: the Ray
    cluster that its jobs run in; ``beats`` grows with every renewal; ``passed_at``: end of the newest pass, Unix seconds."""

    fence: int
    holder: str | None
    cluster: str | None
    beats: int
    passed_at: float | None


@dataclass(frozen=True)
class Watch:
    """A lease as last seen, and since when it stands still (seconds of the watcher's steady clock)."""

    lease: Lease
    since: float


def watch(before: Watch | None, lease: Lease, now: float) -> Watch:
    """``lease`` was read at ``now``."""
    still = before is not None and (before.lease.fence, before.lease.beats) == (lease.fence, lease.beats)
    return Watch(lease, before.since if before is not None and still else now)


def free(watched: Watch, cluster: str, now: float) -> bool:
    """It may be taken: it was given back, or its leader is gone and led the same cluster."""
    lease = watched.lease
    return lease.holder is None or (lease.cluster == cluster and now - watched.since >= LEASE_S)


def foreign(lease: Lease, cluster: str) -> bool:
    """Its jobs run in another cluster, where this server could not see them and would take them for lost."""
    return lease.holder is not None and lease.cluster != cluster
