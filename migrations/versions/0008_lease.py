"""The lease of the one reconciler that leads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    leases = op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("cluster", sa.Text(), nullable=True),
        sa.Column("beats", sa.BigInteger(), nullable=False),
        sa.Column("passed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
        sa.UniqueConstraint("name", "fence", name=op.f("uq_leases_name_fence")),
    )
    op.bulk_insert(leases, [{"name": "reconciler", "fence": 0, "holder": None, "cluster": None, "beats": 0, "passed_at": None}])


def downgrade() -> None:
    op.drop_table("leases")
