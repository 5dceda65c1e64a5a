"""`keepstep doctor`: each kind of trouble is found, named, and has a remedy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api import doctor, server_record
from api.cli import app
from orchestrator.bootstrap import upgrade_database
from orchestrator.settings import Settings, access_token, load
from tests.api.conftest import Running


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a server that has been up, on a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = load(tmp_path / "state", port=port)
    upgrade_database(made)
    access_token(made)
    Path(made.storage).mkdir()
    return made


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def problems(settings: Settings) -> dict[str, str]:
    found = doctor.examine(settings)
    assert [f.name for f in found] == list(doctor.CHECKS)
    assert all((f.remedy is None) == f.ok for f in found)
    return {f.name: f.detail for f in found if not f.ok and f.name not in ("open files", "shared memory")}  # those are the machine's


def test_a_sound_installation_has_no_problem_and_is_left_as_it_was(settings: Settings) -> None:
    before = sorted(settings.state_dir.rglob("*"))
    assert problems(settings) == {}
    assert [path for path in sorted(settings.state_dir.rglob("*")) if path.name not in ("keepstep.db-wal", "keepstep.db-shm")] == [
        path for path in before if path.name not in ("keepstep.db-wal", "keepstep.db-shm")
    ]


def test_before_the_first_start_nothing_is_missing_and_nothing_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert problems(load(tmp_path / "new", port=port)) == {}
    assert not (tmp_path / "new").exists()


def test_a_token_that_others_can_read(settings: Settings) -> None:
    (settings.state_dir / "token").chmod(0o644)
    assert "can be read by others" in problems(settings)["state folder"]


def test_a_port_that_another_program_holds(settings: Settings, busy: int) -> None:
    assert set(problems(load(settings.state_dir, port=busy))) == {"port"}


def test_a_database_that_is_no_database(settings: Settings) -> None:
    (settings.state_dir / "keepstep.db").write_bytes(b"not a database at all" * 99)
    assert "not a database" in problems(settings)["database"]


def test_an_old_schema(settings: Settings) -> None:
    (settings.state_dir / "keepstep.db").unlink()
    (settings.state_dir / "keepstep.db").touch()
    assert "lacks revisions 0001, " in problems(settings)["database"]


def test_a_cluster_that_does_not_answer(settings: Settings, busy: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert "nothing answers" in problems(load(settings.state_dir, port=settings.port, ray_address=f"127.0.0.1:{port}"))["cluster"]
    assert problems(load(settings.state_dir, port=settings.port, ray_address=f"127.0.0.1:{busy}")) == {}


def test_a_storage_that_is_a_file(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert set(problems(load(settings.state_dir, port=settings.port, storage=str(tmp_path / "file")))) == {"storage"}


def test_little_shared_memory(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_SHM", 1 << 60)
    found = next(f for f in doctor.examine(settings) if f.name == "shared memory")
    assert found.remedy is not None
    assert "--shm-size" in found.remedy


def announce(folder: Path, address: str) -> None:
    (folder / server_record.RECORD).write_text(json.dumps(asdict(server_record.ServerRecord(address, 1, 0.0))))


def test_a_server_that_runs(server: Running) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    settings = load(server.state_dir, port=port)
    announce(server.state_dir, server.address)
    assert problems(settings)["server"].endswith("the reconciler has not finished its first pass")
    server.control.reconciler.once()
    assert "server" not in problems(settings)
    announce(server.state_dir, "http://127.0.0.1:1")
    assert "does not answer" in problems(settings)["server"]


def test_the_command_tells_by_its_exit_code(settings: Settings) -> None:
    runner = CliRunner()
    arguments = ["doctor", "--json", "--state-dir", str(settings.state_dir)]
    (settings.state_dir / "token").chmod(0o644)
    answer = runner.invoke(app, arguments)
    assert answer.exit_code == 1
    found = {item["name"]: item for item in json.loads(answer.stdout)["items"]}
    assert found["state folder"]["remedy"].startswith("chmod 600 ")
    told = runner.invoke(app, ["doctor", "--state-dir", str(settings.state_dir)])
    assert "PROBLEM" in told.stdout
    assert "state folder: chmod 600" in told.stderr
