"""The lease of the reconciler as one row, and the check of a fence within a transaction that writes.

Invariant: a lease that was checked cannot be taken before that transaction ends: the check locks the row against a change of its fence,
which is part of a key, and not against renewals.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, make_url, select, update

from orchestrator.adapters.db.engine import reading, writing
from orchestrator.adapters.db.tables import LEASES
from orchestrator.core.lease import Lease
from orchestrator.ports import LeaseLost

RECONCILER = "reconciler"
_MINE = LEASES.c.name == RECONCILER
_COLUMNS = (LEASES.c.fence, LEASES.c.holder, LEASES.c.cluster, LEASES.c.beats, LEASES.c.passed_at)


class SqlLeases:
    """Implements orchestrator.ports.Leases."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def lease(self) -> Lease:
        with reading(self._engine) as connection:
            return Lease(*connection.execute(select(*_COLUMNS).where(_MINE)).one())

    def take(self, known: Lease, holder: str, cluster: str) -> Lease | None:
        """With the next fence, where it still is as it is ``known``."""
        taken = replace(known, fence=known.fence + 1, holder=holder, cluster=cluster, beats=known.beats + 1, passed_at=None)
        return taken if self._changed(known, taken) else None

    def renew(self, lease: Lease, passed_at: float | None) -> Lease | None:
        """None where another one took it."""
        renewed = replace(lease, beats=lease.beats + 1, passed_at=passed_at)
        return renewed if self._changed(lease, renewed, any_beat=True) else None

    def release(self, fence: int) -> None:
        with writing(self._engine) as connection:
            connection.execute(update(LEASES).where(_MINE, LEASES.c.fence == fence).values(holder=None, beats=LEASES.c.beats + 1))

    def _changed(self, before: Lease, after: Lease, *, any_beat: bool = False) -> bool:
        unchanged = [_MINE, LEASES.c.fence == before.fence] + ([] if any_beat else [LEASES.c.beats == before.beats])
        values = {"holder": after.holder, "cluster": after.cluster, "beats": after.beats, "passed_at": after.passed_at}
        if after.fence != before.fence:  # PostgreSQL takes an assignment for a change of the key
            values["fence"] = after.fence
        with writing(self._engine) as connection:
            return connection.execute(update(LEASES).where(*unchanged).values(values)).rowcount == 1


def guard(connection: Connection, fence: int) -> None:
    """Raises LeaseLost where ``fence`` is not the newest; else it stays so until the transaction ends."""
    newest = connection.execute(select(LEASES.c.fence).where(_MINE).with_for_update(read=True, key_share=True)).scalar_one()
    if newest != fence:
        raise LeaseLost(f"lease {fence} is over, {newest} leads")


class OtherServer(Exception):
    """Another server uses the same SQLite file."""


@contextmanager
def only_server(url: str | URL) -> Iterator[bool]:
    """Holds a SQLite file for one server and yields True; False for a database that several may share. Raises OtherServer."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        yield False
        return
    path = Path(str(parsed.database)).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the database itself: closing any descriptor of it would drop the locks that SQLite holds on it.
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OtherServer(
                f"database_url: another server uses {path}, and SQLite serves one; "
                "set KEEPSTEP_DATABASE_URL to a PostgreSQL database for several servers"
            ) from None
        yield True
    finally:
        os.close(descriptor)
