"""The migrations make exactly the tables that the code expects, once, and refuse what is newer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from orchestrator.adapters.db.engine import open_engine, reading, writing
from orchestrator.adapters.db.schema import SchemaTooNew, _config, upgrade
from orchestrator.adapters.db.store import SqlStore
from orchestrator.adapters.db.tables import METADATA
from orchestrator.ports import Unavailable

from .values import incident, new_job, submitted

NEWEST = "0008"


def test_the_migrated_schema_is_the_one_in_the_code(engine: Engine) -> None:
    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, METADATA) == []
        inspector = inspect(connection)
        for table in METADATA.tables.values():
            constraints = inspector.get_foreign_keys(table.name)
            assert all(constraint["options"]["ondelete"] == "CASCADE" for constraint in constraints)


def test_an_upgrade_is_done_once(empty_url: str) -> None:
    engine = open_engine(empty_url)
    assert upgrade(engine) == NEWEST
    job = new_job(1)
    store = SqlStore(engine)
    store.add_job(job, submitted(job), None, "h")
    assert upgrade(engine) is None
    assert store.job(job.id) == job
    engine.dispose()


def test_an_incident_that_is_open_stays_open_over_the_upgrade(empty_url: str) -> None:
    """From the schema that knew the newest one only."""
    engine = open_engine(empty_url)
    upgrade(engine)
    job = new_job(1)
    opened = incident(job, recovered_at=None)
    known = replace(job, open_incidents=(opened,))
    store = SqlStore(engine)
    store.add_job(known, submitted(job), None, "h")
    with writing(engine) as connection:
        kept = connection.execute(text("SELECT open_incidents FROM jobs")).scalar_one()
        config = _config()
        config.attributes["connection"] = connection
        command.downgrade(config, "0003")
        connection.execute(text("UPDATE jobs SET open_incident = :one"), {"one": json.dumps(json.loads(kept)[0])})
    assert upgrade(engine) == NEWEST
    assert store.job(job.id) == known
    engine.dispose()


def test_servers_that_start_together_upgrade_once(empty_url: str) -> None:
    engines = [open_engine(empty_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert sorted(map(str, pool.map(upgrade, engines))) == [NEWEST, "None", "None", "None"]
    for engine in engines:
        engine.dispose()


def test_a_newer_database_is_refused_and_left_alone(engine: Engine) -> None:
    with writing(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(text("UPDATE meta SET value = '7.0.0' WHERE key = 'upgraded_by'"))
    with pytest.raises(SchemaTooNew, match=r"schema 9999 was written by KeepStep 7\.0\.0, this is .*install that version"):
        upgrade(engine)
    with reading(engine) as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"


def test_an_upgrade_that_fails_leaves_the_old_schema(empty_url: str) -> None:
    engine = open_engine(empty_url)
    with writing(engine) as connection:
        connection.execute(text("CREATE TABLE events (stranger TEXT)"))
    with pytest.raises(Exception, match=r"(?i)already exists"):
        upgrade(engine)
    with reading(engine) as connection:
        assert inspect(connection).get_table_names() == ["events"]
    engine.dispose()


def test_a_database_without_tables_is_unavailable_and_says_what_to_do(empty_url: str) -> None:
    engine = open_engine(empty_url)
    with pytest.raises(Unavailable, match="run `keepstep db upgrade`"):
        SqlStore(engine).ping()
    engine.dispose()


def test_odd_folders_are_paths_and_not_urls(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=ro#é%20" / "keep step.db"
    engine = open_engine(f"sqlite:///{path}".replace("?", "%3F"))
    upgrade(engine)
    SqlStore(engine).ping()
    engine.dispose()
    (made,) = tmp_path.iterdir()
    assert (made / "keep step.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://u@h/d", "postgresql"])
def test_other_databases_are_refused_by_name_of_the_setting(url: str) -> None:
    with pytest.raises(ValueError, match=r"database_url: .*sqlite:////path/to/file\.db or postgresql://"):
        open_engine(url)
