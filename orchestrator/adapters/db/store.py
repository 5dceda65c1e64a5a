"""The Store port in SQL. Every public method is one transaction, so that a state, its reason and its event are saved
together or not at all.

Invariants: a row of ``jobs`` changes only where its version is the one that was read; everything else of a job is written after that update
in the same transaction, so its lock gives the events of a job ids in the order of their commits; a report that comes twice changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table, and_, bindparam, case, delete, false, insert, literal, or_, select, text, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from orchestrator.adapters.db import cursors
from orchestrator.adapters.db.engine import reading, writing
from orchestrator.adapters.db.figures import figures, keep
from orchestrator.adapters.db.leases import guard
from orchestrator.adapters.db.notices import notify
from orchestrator.adapters.db.rows import clean, row, value
from orchestrator.adapters.db.tables import ATTEMPTS, CHECKPOINTS, EVENTS, IDEMPOTENCY_KEYS, INCIDENTS, JOBS, LABELS
from orchestrator.core.actions import JobStep
from orchestrator.core.figures import Figures
from orchestrator.core.model import Attempt, Checkpoint, Event, Job
from orchestrator.core.states import FINAL, AttemptState, JobState
from orchestrator.ports import Conflict, KeyReused
from workers.messages import CheckpointCheck, Incident

_log = logging.getLogger(__name__)
T = TypeVar("T")

_FINAL = sorted(state.value for state in FINAL)
_OPEN = sorted(state.value for state in JobState if not state.final)
_ATTEMPT_OPEN = sorted(state.value for state in AttemptState if state != AttemptState.ENDED)
_INTENT = ("desired", "grace_s")
_TOLD = ("reason", "message", "look_again_at")
_FIXED = ("id", "name", "spec", "created_at", "version")


class SqlStore:
    """Jobs in SQLite or PostgreSQL; safe to share between threads. ``engine`` comes from ``open_engine``, its schema from ``upgrade``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def close(self) -> None:
        """Closes the idle connections."""
        self._engine.dispose()

    # intent

    def add_job(self, job: Job, event: Event, idempotency_key: str | None, body_hash: str) -> tuple[Job, bool]:
        """Inserts the job, or finds the one that the key has made: (job, whether it is new). Raises KeyReused."""
        with writing(self._engine) as connection:
            if idempotency_key is not None:
                key = {"key": idempotency_key, "body_hash": body_hash, "job_id": job.id, "created_at": job.created_at}
                if not _insert_new(connection, IDEMPOTENCY_KEYS, [key], ("key",)):
                    return self._made_by(connection, idempotency_key, body_hash), False
            connection.execute(insert(JOBS), row(JOBS, job))
            if job.spec.labels:
                labels = [{"job_id": job.id, "key": key, "value": label} for key, label in job.spec.labels.items()]
                connection.execute(insert(LABELS), labels)
            _insert_new(connection, EVENTS, [row(EVENTS, event)], ("job_id", "source", "source_seq"))
            notify(connection)
        return job, True

    def _made_by(self, connection: Connection, key: str, body_hash: str) -> Job:
        found = connection.execute(
            select(IDEMPOTENCY_KEYS.c.body_hash, JOBS)
            .join(JOBS, JOBS.c.id == IDEMPOTENCY_KEYS.c.job_id)
            .where(IDEMPOTENCY_KEYS.c.key == key)
        ).one()
        if found[0] != body_hash:
            raise KeyReused(f"Idempotency-Key: {key!r} was used with another body; send a new key for a new job")
        return value(Job, JOBS, _named(JOBS, found[1:]))

    def save_intent(self, job: Job, event: Event) -> Job:
        """Writes ``desired`` and ``grace_s`` where the version is still ``job.version``. Raises Conflict."""
        with writing(self._engine) as connection:
            saved = _guarded_update(connection, job, _INTENT)
            _insert_new(connection, EVENTS, [row(EVENTS, event)], ("job_id", "source", "source_seq"))
            notify(connection)
        return saved

    # status

    def save_step(self, step: JobStep, fence: int | None = None) -> Job:
        """Writes one decision where the version is still ``step.job.version``; returns the job with its new version.

        ``fence``: of the server that decided; None: nobody leads, nobody can. Raises Conflict, LeaseLost.
        """
        if not step.changed:
            return step.job
        status = tuple(name for name in JOBS.columns.keys() if name not in _FIXED + _INTENT)  # noqa: SIM118
        with writing(self._engine) as connection:
            if fence is not None:
                guard(connection, fence)
            saved = _guarded_update(connection, step.job, status)
            if step.attempt is not None:
                _upsert(connection, ATTEMPTS, [row(ATTEMPTS, step.attempt)], ("job_id", "number"))
            _insert_new(connection, EVENTS, [row(EVENTS, event) for event in step.events], ("job_id", "source", "source_seq"))
            incidents = {(incident.attempt, incident.generation): row(INCIDENTS, incident) for incident in step.incidents}
            _upsert(connection, INCIDENTS, list(incidents.values()), ("job_id", "attempt", "generation"))
            checkpoints = {record.url: row(CHECKPOINTS, record) for record in step.checkpoints}
            _upsert(connection, CHECKPOINTS, list(checkpoints.values()), ("url",))
            for check in step.checks:
                _record_check(connection, step.job.id, check)
            if step.pruned:
                pruned = CHECKPOINTS.c.url.in_([clean(url) for url in step.pruned])
                connection.execute(delete(CHECKPOINTS).where(CHECKPOINTS.c.job_id == step.job.id, pruned))
        return saved

    def save_told(self, jobs: Sequence[Job], fence: int | None = None) -> None:
        """Writes reason and message of jobs that wait, in one transaction; a job with another version by now is left out. Raises
        LeaseLost."""
        if jobs:
            with writing(self._engine) as connection:
                if fence is not None:
                    guard(connection, fence)
                connection.execute(_guarded(_TOLD), [_guard(job, _TOLD) for job in jobs])

    # reads

    def open_jobs(self) -> tuple[list[Job], dict[str, Attempt]]:
        """Jobs that still need the reconciler, oldest first, with their newest attempts. An unreadable row is logged and left out."""
        unfinished = select(ATTEMPTS.c.job_id).where(ATTEMPTS.c.state.in_(_ATTEMPT_OPEN))
        newest = and_(ATTEMPTS.c.job_id == JOBS.c.id, ATTEMPTS.c.number == JOBS.c.attempt)
        query = (
            select(JOBS, ATTEMPTS)
            .join(ATTEMPTS, newest, isouter=True)
            .where(or_(JOBS.c.state.in_(_OPEN), JOBS.c.id.in_(unfinished)))
            .order_by(JOBS.c.created_at, JOBS.c.id)
        )
        jobs: list[Job] = []
        attempts: dict[str, Attempt] = {}
        width = len(JOBS.columns)
        with reading(self._engine) as connection:
            found = connection.execute(query).all()
        for columns in found:
            try:
                job = value(Job, JOBS, _named(JOBS, columns[:width]))
                attempt = value(Attempt, ATTEMPTS, _named(ATTEMPTS, columns[width:])) if columns[width] is not None else None
            except ValueError:
                _log.exception("job %s: its row cannot be read; it is left alone until that is repaired", columns[0])
                continue
            jobs.append(job)
            if attempt is not None:
                attempts[job.id] = attempt
        return jobs, attempts

    def job(self, ref: str) -> Job | None:
        """By id, else the newest job of that name, an active one first."""
        if clean(ref) != ref:
            return None
        final_last = case((JOBS.c.state.in_(_FINAL), 1), else_=0)
        by_name = select(JOBS).where(JOBS.c.name == ref).order_by(final_last, JOBS.c.created_at.desc(), JOBS.c.id.desc()).limit(1)
        with reading(self._engine) as connection:
            found = connection.execute(select(JOBS).where(JOBS.c.id == ref)).first() or connection.execute(by_name).first()
        return None if found is None else value(Job, JOBS, _named(JOBS, found))

    def active(self, name: str) -> list[Job]:
        """Jobs of that name that are not final, newest first; at most 20."""
        if clean(name) != name:
            return []
        query = select(JOBS).where(JOBS.c.name == name, JOBS.c.state.in_(_OPEN))
        query = query.order_by(JOBS.c.created_at.desc(), JOBS.c.id.desc()).limit(20)
        with reading(self._engine) as connection:
            found = connection.execute(query).all()
        return [value(Job, JOBS, _named(JOBS, columns)) for columns in found]

    def jobs(self, state: str | None, labels: dict[str, str], limit: int, after: str | None) -> tuple[list[Job], str | None]:
        """Newest first. Raises BadCursor."""
        query = select(JOBS)
        if state is not None:
            query = query.where(JOBS.c.state == clean(state))
        for key, label in labels.items():
            given = and_(LABELS.c.key == key, LABELS.c.value == label) if clean(key + label) == key + label else false()
            query = query.where(JOBS.c.id.in_(select(LABELS.c.job_id).where(given)))
        if after is not None:
            at, job_id = cursors.decode("jobs", after, (float, str))
            query = query.where(tuple_(JOBS.c.created_at, JOBS.c.id) < tuple_(literal(at), literal(job_id)))
        query = query.order_by(JOBS.c.created_at.desc(), JOBS.c.id.desc()).limit(limit + 1)
        with reading(self._engine) as connection:
            found = connection.execute(query).all()
        return _page("jobs", Job, JOBS, found, limit, lambda columns: (columns["created_at"], columns["id"]))

    def attempts(self, job_id: str) -> list[Attempt]:
        """Oldest first."""
        with reading(self._engine) as connection:
            found = connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.job_id == clean(job_id)).order_by(ATTEMPTS.c.number)).all()
        return [value(Attempt, ATTEMPTS, _named(ATTEMPTS, columns)) for columns in found]

    def incidents(self, job_id: str, limit: int, after: str | None) -> tuple[list[Incident], str | None]:
        """Oldest first. Raises BadCursor."""
        return self._history("incidents", Incident, INCIDENTS, job_id, limit, after)

    def events(self, job_id: str, limit: int, after: str | None) -> tuple[list[Event], str | None]:
        """Oldest first. Raises BadCursor."""
        return self._history("events", Event, EVENTS, job_id, limit, after)

    def events_after(self, job_id: str, event_id: int, limit: int) -> list[Event]:
        """At most ``limit`` with a higher id, oldest first."""
        newer = select(EVENTS).where(EVENTS.c.job_id == clean(job_id), EVENTS.c.id > event_id)
        with reading(self._engine) as connection:
            found = connection.execute(newer.order_by(EVENTS.c.id).limit(limit)).all()
        return [value(Event, EVENTS, _named(EVENTS, columns)) for columns in found]

    def checkpoints(self, job_id: str, limit: int, after: str | None) -> tuple[list[Checkpoint], str | None]:
        """Newest first. Raises BadCursor."""
        return self._history("checkpoints", Checkpoint, CHECKPOINTS, job_id, limit, after, newest_first=True)

    def checkpoint(self, job_id: str, step: int) -> Checkpoint | None:
        """The newest of that step."""
        query = select(CHECKPOINTS).where(CHECKPOINTS.c.job_id == clean(job_id), CHECKPOINTS.c.step == step)
        query = query.order_by(CHECKPOINTS.c.attempt.desc(), CHECKPOINTS.c.generation.desc()).limit(1)
        with reading(self._engine) as connection:
            found = connection.execute(query).first()
        return None if found is None else value(Checkpoint, CHECKPOINTS, _named(CHECKPOINTS, found))

    def save_check(self, job_id: str, check: CheckpointCheck) -> None:
        """Keeps what reading a checkpoint has shown, unless a later reading is known."""
        with writing(self._engine) as connection:
            _record_check(connection, job_id, check)

    def save_pin(self, job_id: str, url: str, at: float | None) -> None:
        """``at``: since when it is pinned (Unix seconds); None: it is not."""
        mine = (CHECKPOINTS.c.job_id == clean(job_id), CHECKPOINTS.c.url == clean(url))
        with writing(self._engine) as connection:
            connection.execute(update(CHECKPOINTS).where(*mine).values(pinned_at=at))

    def pinned(self, job_id: str) -> list[int]:
        """Steps of its pinned checkpoints."""
        mine = (CHECKPOINTS.c.job_id == clean(job_id), CHECKPOINTS.c.pinned_at.is_not(None))
        with reading(self._engine) as connection:
            return list(connection.execute(select(CHECKPOINTS.c.step).where(*mine).order_by(CHECKPOINTS.c.step)).scalars())

    def delete_job(self, job_id: str) -> None:
        """The job with all its rows; what it has added to the counters stays."""
        with writing(self._engine) as connection:
            keep(connection, clean(job_id))
            connection.execute(delete(JOBS).where(JOBS.c.id == clean(job_id)))

    def _history(
        self, kind: str, cls: type[T], table: Table, job_id: str, limit: int, after: str | None, *, newest_first: bool = False
    ) -> tuple[list[T], str | None]:
        query = select(table).where(table.c.job_id == clean(job_id))
        if after is not None:
            (last,) = cursors.decode(kind, after, (int,))
            query = query.where(table.c.id < last if newest_first else table.c.id > last)
        query = query.order_by(table.c.id.desc() if newest_first else table.c.id).limit(limit + 1)
        with reading(self._engine) as connection:
            found = connection.execute(query).all()
        return _page(kind, cls, table, found, limit, lambda columns: (columns["id"],))

    def figures(self) -> Figures:
        return figures(self._engine)

    def ping(self) -> None:
        """Raises Unavailable, also where the schema is missing."""
        with reading(self._engine) as connection:
            connection.execute(text("SELECT 1 FROM meta LIMIT 1"))


def _named(table: Table, columns: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(table.columns.keys(), columns, strict=True))


def _page(
    kind: str, cls: type[T], table: Table, found: Sequence[Sequence[Any]], limit: int, key: Callable[[Mapping[str, Any]], cursors.Key]
) -> tuple[list[T], str | None]:
    """The first ``limit`` of ``limit + 1`` rows that were asked for, and a cursor where there are more."""
    rows = [_named(table, columns) for columns in found[:limit]]
    more = len(found) > limit
    return [value(cls, table, columns) for columns in rows], cursors.encode(kind, key(rows[-1])) if more else None


def _guarded_update(connection: Connection, job: Job, names: Sequence[str]) -> Job:
    if connection.execute(_guarded(tuple(names)), _guard(job, names)).rowcount == 0:
        raise Conflict(f"job {job.id} is no longer at version {job.version}")
    return replace(job, version=job.version + 1)


def _guard(job: Job, names: Sequence[str]) -> dict[str, Any]:
    """What ``_guarded`` asks for."""
    return row(JOBS, job, names) | {"version": job.version + 1, "job": job.id, "read": job.version}


@cache  # building a statement takes longer than running it
def _guarded(names: tuple[str, ...]) -> Any:
    changes = {name: bindparam(name, type_=JOBS.c[name].type) for name in (*names, "version")}
    return update(JOBS).where(JOBS.c.id == bindparam("job"), JOBS.c.version == bindparam("read")).values(changes)


def _record_check(connection: Connection, job_id: str, check: CheckpointCheck) -> None:
    older = or_(CHECKPOINTS.c.verified_at.is_(None), CHECKPOINTS.c.verified_at < check.at)
    mine = (CHECKPOINTS.c.job_id == clean(job_id), CHECKPOINTS.c.url == clean(check.url))
    connection.execute(update(CHECKPOINTS).where(*mine, older).values(verified_at=check.at, problem=clean(check.problem)))


def _insert_into(dialect: str, table: Table) -> Any:
    # Both dialects spell ON CONFLICT alike, but the generic insert does not know it.
    return (sqlite if dialect == "sqlite" else postgresql).insert(table)


def _insert_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], unique: Sequence[str]) -> bool:
    """Inserts the rows whose ``unique`` columns are new; False when one was not."""
    statement = _inserting(connection.dialect.name, table, tuple(unique))
    written = [connection.execute(statement, columns).first() is not None for columns in rows]
    return all(written)


@cache
def _inserting(dialect: str, table: Table, unique: tuple[str, ...]) -> Any:
    # What comes back is counted, since the row count of an INSERT is not reliable in every driver.
    return _insert_into(dialect, table).on_conflict_do_nothing(index_elements=unique).returning(table.c[unique[0]])


def _upsert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], unique: Sequence[str]) -> None:
    if rows:
        connection.execute(_upserting(connection.dialect.name, table, tuple(rows[0]), tuple(unique)), rows)


@cache
def _upserting(dialect: str, table: Table, names: tuple[str, ...], unique: tuple[str, ...]) -> Any:
    statement = _insert_into(dialect, table)
    changes = {name: statement.excluded[name] for name in names if name not in unique}
    return statement.on_conflict_do_update(index_elements=unique, set_=changes)
