"""The newest checkpoint of a job, so that storage which has lost them all is not taken for a job that never made one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("checkpoint_step", sa.BigInteger(), nullable=True))
    op.execute("UPDATE jobs SET checkpoint_step = (SELECT max(step) FROM checkpoints WHERE checkpoints.job_id = jobs.id)")


def downgrade() -> None:
    op.drop_column("jobs", "checkpoint_step")
