"""Incidents keep the Python stacks of a hang."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("incidents", sa.Column("stacks", sa.Text(), server_default="{}", nullable=False))


def downgrade() -> None:
    op.drop_column("incidents", "stacks")
