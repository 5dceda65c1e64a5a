"""Alembic's entry: runs the revisions on the connection that ``upgrade`` hands over, or on KEEPSTEP_DATABASE_URL for alembic itself."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.tables import METADATA


def migrate(connection: Connection) -> None:
    # SQLite can take back DDL, since our engine begins its transactions by itself.
    context.configure(connection=connection, target_metadata=METADATA, transactional_ddl=True, compare_type=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    with open_engine(os.environ["KEEPSTEP_DATABASE_URL"]).begin() as own:
        migrate(own)
