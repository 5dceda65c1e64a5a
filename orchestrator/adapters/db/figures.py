"""Counts over all jobs, by the database itself.

Invariant: what is counted since ever does not fall when a job is deleted; ``keep`` moves its share to the tables of the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, Subquery, case, func, insert, select, union_all

from orchestrator.adapters.db.engine import reading
from orchestrator.adapters.db.tables import ATTEMPTS, CHECKPOINTS, INCIDENTS, JOBS, PAST_FAILURES, PAST_JOBS
from orchestrator.core.figures import RECOVERY_S, WAIT_S, Figures, Spread
from orchestrator.core.states import JobState

_WAITS = (
    select((ATTEMPTS.c.created_at - JOBS.c.created_at).label("queue_wait"), (JOBS.c.started_at - JOBS.c.created_at).label("start"))
    .select_from(JOBS)
    .outerjoin(ATTEMPTS, (ATTEMPTS.c.job_id == JOBS.c.id) & (ATTEMPTS.c.number == 1))
)
_FAILURES = select(INCIDENTS.c.cause, INCIDENTS.c.kind, INCIDENTS.c.recovery_seconds, INCIDENTS.c.lost_steps).where(
    INCIDENTS.c.drill.is_(None)
)


def keep(connection: Connection, job_id: str) -> None:
    """What the job about to be deleted has added to the counters."""
    waits, failures = _WAITS.where(JOBS.c.id == job_id), _FAILURES.where(INCIDENTS.c.job_id == job_id)
    connection.execute(insert(PAST_JOBS).from_select(["queue_wait", "start"], waits))
    connection.execute(insert(PAST_FAILURES).from_select(["cause", "kind", "recovery_seconds", "lost_steps"], failures))


def figures(engine: Engine) -> Figures:
    """All in one transaction, so they fit each other. Raises Unavailable."""
    waits = _ever(_WAITS, select(PAST_JOBS.c.queue_wait, PAST_JOBS.c.start))
    past = PAST_FAILURES.c
    ever = _ever(_FAILURES, select(past.cause, past.kind, past.recovery_seconds, past.lost_steps))
    recoveries = (
        select(ever.c.cause, func.sum(ever.c.lost_steps), *_spread(ever.c.recovery_seconds, RECOVERY_S))
        .where(ever.c.recovery_seconds.is_not(None))
        .group_by(ever.c.cause)
    )
    failures = select(ever.c.cause, ever.c.kind, func.count()).group_by(ever.c.cause, ever.c.kind)
    with reading(engine) as connection:
        known = {JobState(state): count for state, count in connection.execute(select(JOBS.c.state, func.count()).group_by(JOBS.c.state))}
        by_cause = connection.execute(recoveries).all()
        return Figures(
            jobs={state: known.get(state, 0) for state in JobState},
            unreachable=_count(connection, select(func.count()).select_from(JOBS).where(JOBS.c.unreachable_since.is_not(None))),
            queue_wait=_read(WAIT_S, connection.execute(select(*_spread(waits.c.queue_wait, WAIT_S))).one()),
            start=_read(WAIT_S, connection.execute(select(*_spread(waits.c.start, WAIT_S))).one()),
            recovery={cause: _read(RECOVERY_S, rest) for cause, _, *rest in by_cause},
            lost_steps={cause: int(lost or 0) for cause, lost, *_ in by_cause},
            failures={(cause, kind): count for cause, kind, count in connection.execute(failures)},
            checkpoints=_count(connection, select(func.count()).select_from(CHECKPOINTS)),
        )


def _ever(now: Select[Any], past: Select[Any]) -> Subquery:
    return union_all(now, past).subquery()


def _count(connection: Connection, query: Select[Any]) -> int:
    return int(connection.execute(query).scalar_one())


def _spread(value: ColumnElement[Any], bounds: Sequence[float]) -> list[ColumnElement[Any]]:
    """Columns of an aggregate over what is not null: how many, their sum, and how many within each bound."""
    return [func.count(value), func.sum(value), *(func.sum(case((value <= bound, 1), else_=0)) for bound in bounds)]


def _read(bounds: tuple[float, ...], columns: Sequence[Any]) -> Spread:
    count, total, *within = columns
    return Spread(bounds, tuple(int(n or 0) for n in within), int(count), float(total or 0.0))
