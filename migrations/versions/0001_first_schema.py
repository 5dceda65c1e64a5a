"""The first schema: jobs and what happened to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("desired", sa.Text(), nullable=False),
        sa.Column("grace_s", sa.Double(), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("best_step", sa.BigInteger(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("failures", sa.Text(), nullable=False),
        sa.Column("restarts", sa.BigInteger(), nullable=False),
        sa.Column("stalled", sa.BigInteger(), nullable=False),
        sa.Column("open_incident", sa.Text(), nullable=False),
        sa.Column("unreachable_since", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("look_again_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"], unique=False)
    op.create_index("ix_jobs_name", "jobs", ["name"], unique=False)
    op.create_index("ix_jobs_state", "jobs", ["state"], unique=False)
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_meta"),
    )
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("nodes", sa.Text(), nullable=False),
        sa.Column("cpus_per_node", sa.Double(), nullable=False),
        sa.Column("gpus_per_node", sa.BigInteger(), nullable=False),
        sa.Column("memory_gb", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("first_generation", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("report_version", sa.BigInteger(), nullable=False),
        sa.Column("events_seen", sa.BigInteger(), nullable=False),
        sa.Column("checkpoints_seen", sa.Double(), nullable=True),
        sa.Column("prior_best_step", sa.BigInteger(), nullable=True),
        sa.Column("absent_since", sa.Double(), nullable=True),
        sa.Column("ending_since", sa.Double(), nullable=True),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_attempts"),
    )
    op.create_index("ix_attempts_state", "attempts", ["state"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=False),
        sa.Column("write_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.UniqueConstraint("url", name="uq_checkpoints_url"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_checkpoints_job_id_id", "checkpoints", ["job_id", "id"], unique=False)
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("source_seq", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.UniqueConstraint("job_id", "source", "source_seq", name="uq_events_job_id_source_source_seq"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id", ondelete="CASCADE", initially="DEFERRED", deferrable=True
        ),
        sa.PrimaryKeyConstraint("key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_job_id", "idempotency_keys", ["job_id"], unique=False)
    op.create_table(
        "incidents",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("blamed_rank", sa.BigInteger(), nullable=True),
        sa.Column("blamed_node", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("signal", sa.BigInteger(), nullable=True),
        sa.Column("excerpt", sa.Text(), nullable=False),
        sa.Column("drill", sa.Text(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("resumed_step", sa.BigInteger(), nullable=True),
        sa.Column("lost_steps", sa.BigInteger(), nullable=True),
        sa.Column("restored_from", sa.Text(), nullable=False),
        sa.Column("phases_ms", sa.Text(), nullable=False),
        sa.Column("recovery_seconds", sa.Double(), nullable=True),
        sa.Column("recovered_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_incidents_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_incidents"),
        sa.UniqueConstraint("job_id", "attempt", "generation", name="uq_incidents_job_id_attempt_generation"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "labels",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_labels_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_labels"),
    )
    op.create_index("ix_labels_key_value", "labels", ["key", "value"], unique=False)


def downgrade() -> None:
    for table in ("labels", "incidents", "idempotency_keys", "events", "checkpoints", "attempts", "meta", "jobs"):
        op.drop_table(table)
