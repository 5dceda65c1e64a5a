"""All incidents of a job that are open, rather than the newest one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("open_incidents", sa.Text(), server_default="[]", nullable=False))
    op.execute("UPDATE jobs SET open_incidents = '[' || open_incident || ']' WHERE open_incident <> 'null'")
    op.drop_column("jobs", "open_incident")


def downgrade() -> None:
    op.add_column("jobs", sa.Column("open_incident", sa.Text(), server_default="null", nullable=False))
    op.drop_column("jobs", "open_incidents")
