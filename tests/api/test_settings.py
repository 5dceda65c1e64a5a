"""Where settings come from, the token's file, and the one server of a state folder."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from api import server_record
from api.server_record import ServerDown
from orchestrator.settings import SettingsError, access_token, load, prepare_state_dir, state_folder


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KEEPSTEP_"):
            monkeypatch.delenv(name)


def test_environment_over_file_over_defaults_and_arguments_over_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(tmp_path)
    assert (settings.host, settings.port, settings.storage) == ("127.0.0.1", 8765, str(tmp_path / "storage"))
    assert settings.database_url == f"sqlite:///{tmp_path / 'keepstep.db'}"
    (tmp_path / "config.toml").write_text('port = 1000\nhost = "::1"\nstorage = "s3://bucket/x"\n')
    monkeypatch.setenv("KEEPSTEP_PORT", "2000")
    assert (load(tmp_path).port, load(tmp_path).host, load(tmp_path).storage) == (2000, "::1", "s3://bucket/x")
    assert load(tmp_path, port=0, host=None).port == 0


def test_bad_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("colour = 1\n")
    monkeypatch.setenv("KEEPSTEP_PORT", "99999")
    monkeypatch.setenv("KEEPSTEP_TOKEN", "short")
    with pytest.raises(SettingsError) as error:
        load(tmp_path)
    assert all(text in str(error.value) for text in ("colour", "port", "65535", "token", "16"))
    assert "short" not in str(error.value)
    (tmp_path / "config.toml").write_text("= nonsense")
    with pytest.raises(SettingsError, match=r"config\.toml cannot be read"):
        load(tmp_path)


def test_state_folder_is_chosen_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_STATE_DIR", str(tmp_path / "env"))
    assert state_folder() == tmp_path / "env"
    assert state_folder("x") == Path.cwd() / "x"
    with pytest.raises(SettingsError, match="choose another with --state-dir"):
        prepare_state_dir(Path("/proc/nothing"))


def test_token_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: access_token(load(tmp_path)), range(8)))
    assert len(tokens) == 1
    path = tmp_path / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert {access_token(load(tmp_path))} == tokens
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]
    path.write_text("")
    with pytest.raises(SettingsError, match="holds no token"):
        access_token(load(tmp_path))


def test_second_server_on_a_state_folder_is_refused(tmp_path: Path) -> None:
    with server_record.only_server(tmp_path), server_record.announced(tmp_path, "http://127.0.0.1:1"):
        assert server_record.is_held(tmp_path)
        with pytest.raises(SettingsError, match="already uses the state folder"), server_record.only_server(tmp_path):
            raise AssertionError("two servers")
        record = server_record.read(tmp_path)
        assert record is not None
        process = server_record.process_of(record)
        assert process is not None
        assert process.pid == os.getpid()
        assert server_record.process_of(server_record.ServerRecord(record.address, record.pid, record.started_at - 100)) is None
    assert not server_record.is_held(tmp_path)
    assert server_record.read(tmp_path) is None


def test_finding_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerDown, match="keepstep up"):
        server_record.find(tmp_path)
    (tmp_path / "server.json").write_text('{"address": "http://127.0.0.1:1", "pid": 999999999, "started_at": 1}')
    with pytest.raises(ServerDown, match="no server runs"):
        server_record.find(tmp_path)
    monkeypatch.setenv("KEEPSTEP_SERVER", "http://10.0.0.1:1/")
    with pytest.raises(SettingsError, match="KEEPSTEP_TOKEN"):
        server_record.find(tmp_path)
    monkeypatch.setenv("KEEPSTEP_TOKEN", "a-token-from-the-environment")
    assert server_record.find(tmp_path) == ("http://10.0.0.1:1", "a-token-from-the-environment")
    monkeypatch.setenv("KEEPSTEP_SERVER", "10.0.0.1")
    with pytest.raises(SettingsError, match="must be a URL"):
        server_record.find(tmp_path)
