"""The tables. A column has the name of the field that it holds, so that a row and its dataclass map one to one.

Invariants: an instant is a double of Unix seconds, exact in both databases and free of time zones (PostgreSQL's ``to_timestamp``
shows one); JSON is text that we write ourselves, because PostgreSQL's own type refuses a NaN loss; every row of a job goes with its job.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, MetaData, Table, Text, UniqueConstraint, true

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only when the key is exactly INTEGER.
_ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")


def _text(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, Text, nullable=null)


def _json(name: str, default: str | None = None) -> Column[Any]:
    """``default``: of rows that are older than the column."""
    return Column(name, Text, nullable=False, server_default=default, info={"json": True})


def _instant(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, Double, nullable=null)


def _number(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, BigInteger, nullable=null)


def _double(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, Double, nullable=null)


def _job_id(*, primary_key: bool = False) -> Column[Any]:
    return Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=primary_key, nullable=False)


def _row_id() -> Column[Any]:
    return Column("id", _ROW_NUMBER, primary_key=True, autoincrement=True)


JOBS = Table(
    "jobs",
    METADATA,
    Column("id", Text, primary_key=True),
    _text("name"),
    _json("spec"),
    _text("state"),
    _text("reason"),
    _text("message"),
    _instant("created_at"),
    _number("version"),
    _text("desired"),
    _double("grace_s", null=True),
    _number("attempt"),
    _number("generation"),
    _number("step", null=True),
    _number("best_step", null=True),
    _number("checkpoint_step", null=True),
    _json("metrics"),
    _json("failures"),
    _number("restarts"),
    _number("stalled"),
    _json("open_incidents", default="[]"),
    _instant("unreachable_since", null=True),
    _instant("started_at", null=True),
    _instant("ended_at", null=True),
    _instant("look_again_at", null=True),
    _json("saving", default="null"),
    Index(None, "state"),
    Index(None, "name"),
    Index(None, "created_at", "id"),
)

LABELS = Table(
    "labels",
    METADATA,
    _job_id(primary_key=True),
    Column("key", Text, primary_key=True),
    _text("value"),
    Index(None, "key", "value"),
)

ATTEMPTS = Table(
    "attempts",
    METADATA,
    _job_id(primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    _text("state"),
    _json("nodes"),
    _double("cpus_per_node"),
    _number("gpus_per_node"),
    _double("memory_gb"),
    _instant("created_at"),
    _number("first_generation"),
    _number("generation"),
    _number("report_version"),
    _number("events_seen"),
    _instant("checkpoints_seen", null=True),
    _instant("checks_seen", null=True),
    _number("prior_best_step", null=True),
    _instant("absent_since", null=True),
    _instant("ending_since", null=True),
    _json("ranks"),
    _text("outcome", null=True),
    _text("reason"),
    _text("message"),
    _instant("started_at", null=True),
    _instant("ended_at", null=True),
    Index(None, "state"),
)

EVENTS = Table(
    "events",
    METADATA,
    _row_id(),
    _job_id(),
    _instant("at"),
    _text("reason"),
    _text("message"),
    _text("source"),
    _number("source_seq", null=True),
    _number("attempt", null=True),
    _number("generation", null=True),
    _number("rank", null=True),
    UniqueConstraint("job_id", "source", "source_seq"),
    Index(None, "job_id", "id"),
    sqlite_autoincrement=True,
)

INCIDENTS = Table(
    "incidents",
    METADATA,
    _row_id(),
    _job_id(),
    _number("attempt"),
    _number("generation"),
    _instant("at"),
    _text("cause"),
    _text("kind"),
    _text("message"),
    _text("action"),
    _number("blamed_rank", null=True),
    _text("blamed_node", null=True),
    _number("exit_code", null=True),
    _number("signal", null=True),
    _text("excerpt"),
    _json("stacks", default="{}"),
    _text("drill", null=True),
    _number("last_step", null=True),
    _number("resumed_step", null=True),
    _number("lost_steps", null=True),
    _text("restored_from"),
    _json("phases_ms"),
    _double("recovery_seconds", null=True),
    _instant("recovered_at", null=True),
    UniqueConstraint("job_id", "attempt", "generation"),
    sqlite_autoincrement=True,
)

CHECKPOINTS = Table(
    "checkpoints",
    METADATA,
    _row_id(),
    _job_id(),
    _number("attempt"),
    _number("generation"),
    _number("step"),
    _text("url"),
    _number("bytes"),
    _number("files"),
    _number("world_size"),
    _instant("committed_at"),
    _double("write_seconds"),
    _instant("verified_at", null=True),
    _text("problem", null=True),
    _instant("pinned_at", null=True),
    Column("finite", Boolean, nullable=False, server_default=true()),  # the default: of rows that are older than the column
    UniqueConstraint("url"),
    Index(None, "job_id", "id"),
    sqlite_autoincrement=True,
)

# What deleted jobs leave for the counters of /metrics, which must not fall. Nothing in it names a job.
PAST_JOBS = Table("past_jobs", METADATA, _row_id(), _double("queue_wait", null=True), _double("start", null=True))

PAST_FAILURES = Table(
    "past_failures",
    METADATA,
    _row_id(),
    _text("cause"),
    _text("kind"),
    _double("recovery_seconds", null=True),
    _number("lost_steps", null=True),
)

# The key is written before its job, in the same transaction: it is the lock that lets one of many equal requests through.
IDEMPOTENCY_KEYS = Table(
    "idempotency_keys",
    METADATA,
    Column("key", Text, primary_key=True),
    _text("body_hash"),
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE", deferrable=True, initially="DEFERRED"), nullable=False),
    _instant("created_at"),
    Index(None, "job_id"),
)

# The fence is part of a key, so that PostgreSQL's key share locks hold it still and let renewals pass.
LEASES = Table(
    "leases",
    METADATA,
    Column("name", Text, primary_key=True),
    _number("fence"),
    _text("holder", null=True),
    _text("cluster", null=True),
    _number("beats"),
    _instant("passed_at", null=True),
    UniqueConstraint("name", "fence"),
)

META = Table("meta", METADATA, Column("key", Text, primary_key=True), _text("value"))
