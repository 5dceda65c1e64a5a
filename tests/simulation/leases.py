"""The real lease, with a database that is away now and then."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, insert

from orchestrator.adapters.db.leases import RECONCILER, SqlLeases
from orchestrator.adapters.db.tables import LEASES
from orchestrator.core.lease import Lease
from orchestrator.leadership import Leadership
from orchestrator.ports import Unavailable
from tests.simulation.clock import Dice


def add_lease(engine: Engine) -> None:
    """What the migrations insert."""
    with engine.begin() as connection:
        connection.execute(insert(LEASES).values(name=RECONCILER, fence=0, beats=0))


class DicedLeases(SqlLeases):
    def __init__(self, engine: Engine, dice: Dice) -> None:
        super().__init__(engine)
        self._dice = dice

    def renew(self, lease: Lease, passed_at: float | None) -> Lease | None:
        if self._dice.fault(0.05):
            raise Unavailable("database is away")
        renewed = super().renew(lease, passed_at)
        if self._dice.fault(0.02):
            raise Unavailable("renewed, but the answer was lost")
        return renewed


def leading(leases: Any, wake: Any) -> Leadership:
    """A server that leads for ever, for tests of what a leader does."""
    lease = Leadership(leases, "test", "cluster", wake, sole=True)
    lease.beat()
    return lease
