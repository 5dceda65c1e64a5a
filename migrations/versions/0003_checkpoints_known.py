"""What is known of a checkpoint after its commit, and of the one that is being written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = (
    ("checkpoints", "verified_at", sa.Double()),
    ("checkpoints", "problem", sa.Text()),
    ("checkpoints", "pinned_at", sa.Double()),
    ("attempts", "checks_seen", sa.Double()),
)


def upgrade() -> None:
    for table, name, kind in COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=True))
    op.add_column("jobs", sa.Column("saving", sa.Text(), server_default="null", nullable=False))


def downgrade() -> None:
    op.drop_column("jobs", "saving")
    for table, name, _ in reversed(COLUMNS):
        op.drop_column(table, name)
