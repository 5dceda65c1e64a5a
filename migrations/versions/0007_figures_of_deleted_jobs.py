"""What deleted jobs leave for the counters, which must not fall."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "past_jobs",
        sa.Column("id", ROW_NUMBER, autoincrement=True, nullable=False),
        sa.Column("queue_wait", sa.Double(), nullable=True),
        sa.Column("start", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_past_jobs")),
    )
    op.create_table(
        "past_failures",
        sa.Column("id", ROW_NUMBER, autoincrement=True, nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("recovery_seconds", sa.Double(), nullable=True),
        sa.Column("lost_steps", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_past_failures")),
    )


def downgrade() -> None:
    op.drop_table("past_failures")
    op.drop_table("past_jobs")
