"""Counts over all jobs, by the database itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, and_, case, func, select

from orchestrator.adapters.db.engine import reading
from orchestrator.adapters.db.tables import ATTEMPTS, CHECKPOINTS, INCIDENTS, JOBS
from orchestrator.core.figures import RECOVERY_S, WAIT_S, Figures, Spread
from orchestrator.core.states import JobState


def figures(engine: Engine) -> Figures:
    """All in one transaction, so they fit each other. Raises Unavailable."""
    waited = ATTEMPTS.c.created_at - JOBS.c.created_at
    placed = select(*_spread(waited, WAIT_S)).join(JOBS, JOBS.c.id == ATTEMPTS.c.job_id).where(ATTEMPTS.c.number == 1)
    started = select(*_spread(JOBS.c.started_at - JOBS.c.created_at, WAIT_S)).where(JOBS.c.started_at.is_not(None))
    real = INCIDENTS.c.drill.is_(None)
    recovered = and_(real, INCIDENTS.c.recovery_seconds.is_not(None))
    recoveries = (
        select(INCIDENTS.c.cause, func.sum(INCIDENTS.c.lost_steps), *_spread(INCIDENTS.c.recovery_seconds, RECOVERY_S))
        .where(recovered)
        .group_by(INCIDENTS.c.cause)
    )
    failures = select(INCIDENTS.c.cause, INCIDENTS.c.kind, func.count()).where(real).group_by(INCIDENTS.c.cause, INCIDENTS.c.kind)
    with reading(engine) as connection:
        known = {JobState(state): count for state, count in connection.execute(select(JOBS.c.state, func.count()).group_by(JOBS.c.state))}
        by_cause = connection.execute(recoveries).all()
        return Figures(
            jobs={state: known.get(state, 0) for state in JobState},
            unreachable=_count(connection, select(func.count()).select_from(JOBS).where(JOBS.c.unreachable_since.is_not(None))),
            queue_wait=_read(WAIT_S, connection.execute(placed).one()),
            start=_read(WAIT_S, connection.execute(started).one()),
            recovery={cause: _read(RECOVERY_S, rest) for cause, _, *rest in by_cause},
            lost_steps={cause: int(lost or 0) for cause, lost, *_ in by_cause},
            failures={(cause, kind): count for cause, kind, count in connection.execute(failures)},
            checkpoints=_count(connection, select(func.count()).select_from(CHECKPOINTS)),
        )


def _count(connection: Connection, query: Select[Any]) -> int:
    return int(connection.execute(query).scalar_one())


def _spread(value: ColumnElement[Any], bounds: Sequence[float]) -> list[ColumnElement[Any]]:
    """Columns of an aggregate: how many, their sum, and how many within each bound."""
    return [func.count(), func.sum(value), *(func.sum(case((value <= bound, 1), else_=0)) for bound in bounds)]


def _read(bounds: tuple[float, ...], columns: Sequence[Any]) -> Spread:
    count, total, *within = columns
    return Spread(bounds, tuple(int(n or 0) for n in within), int(count), float(total or 0.0))
