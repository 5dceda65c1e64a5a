"""Brings the database to the schema of this code. Invariant: all of an upgrade is one transaction under a lock, so servers that start
together upgrade once, and a crash leaves the old schema whole.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, delete, insert, select, text

from orchestrator.adapters.db.engine import reading, writing
from orchestrator.adapters.db.tables import META

_PACKAGE = Path(__file__).parents[2]
_LOCK = 0x6B656570  # any number that no other program on the same database uses


class SchemaTooNew(Exception):
    """The database was upgraded by a newer KeepStep; this one would misread it."""


def pending(engine: Engine) -> list[str]:
    """Revisions that ``upgrade`` would run, oldest first. Raises Unavailable."""
    scripts = ScriptDirectory.from_config(_config())
    with reading(engine) as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    return [script.revision for script in scripts.iterate_revisions("head", current)][::-1]


def upgrade(engine: Engine) -> str | None:
    """Runs the missing revisions. Returns the new revision, None when there was nothing to do. Raises SchemaTooNew, Unavailable."""
    config = _config()
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    with writing(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            connection.execute(text("SET LOCAL statement_timeout = 0"))
        current = MigrationContext.configure(connection).get_current_revision()
        if current == head:
            return None
        if current is not None and current not in {script.revision for script in scripts.walk_revisions()}:
            raise SchemaTooNew(
                f"database: its schema {current} was written by KeepStep {_written_by(connection)}, this is {version('keepstep')}; "
                "install that version or a newer one"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.execute(delete(META).where(META.c.key == "upgraded_by"))
        connection.execute(insert(META).values(key="upgraded_by", value=version("keepstep")))
    return head


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    return config


def _migrations() -> Path:
    in_wheel = _PACKAGE / "migrations"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "migrations"


def _written_by(connection: Connection) -> str:
    return connection.execute(select(META.c.value).where(META.c.key == "upgraded_by")).scalar() or "of an unknown version"
