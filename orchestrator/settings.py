"""Settings of one KeepStep server: the KEEPSTEP_* environment over ``config.toml`` in the state folder over the defaults.

Invariants: everything that the server keeps on this machine lies under ``state_dir`` unless a setting says otherwise; the access token
is made once, by the first start, and its file is never readable for others.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

CONFIG_FILE = "config.toml"
TOKEN_FILE = "token"
MIN_TOKEN = 16


class SettingsError(Exception):
    """A setting cannot be used; the text names each bad field, its limit and where it is set."""


class Settings(BaseSettings):
    """See the field descriptions; build it with ``load``."""

    model_config = SettingsConfigDict(env_prefix="KEEPSTEP_", extra="forbid", frozen=True, env_ignore_empty=True)

    state_dir: Path = Field(description="folder of database, token, embedded cluster and server record")
    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="address that the server listens on")
    port: int = Field(8765, ge=0, le=65535, description="TCP port; 0 takes a free one")
    database_url: str = Field("", description="SQLAlchemy URL; default: SQLite in the state folder")
    ray_address: str | None = Field(None, description="host:port of an existing Ray cluster; default: an embedded one is started")
    storage: str = Field("", description="fsspec URL or folder for bundles, logs and checkpoints; default: storage/ in the state folder")
    token: SecretStr | None = Field(None, description="access token; default: the one in the state folder")

    @field_validator("token")
    @classmethod
    def _strong(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            text = token.get_secret_value()
            if len(text) < MIN_TOKEN or not all("!" <= c <= "~" for c in text):
                raise ValueError(f"must be at least {MIN_TOKEN} printable ASCII characters without blanks")
        return token

    @field_validator("storage")
    @classmethod
    def _same_from_every_folder(cls, storage: str) -> str:
        return storage if "://" in storage else str(Path(storage).expanduser().absolute())

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        folder = Path(values["state_dir"])
        values["database_url"] = values.get("database_url") or f"sqlite:///{folder / 'keepstep.db'}"
        values["storage"] = values.get("storage") or str(folder / "storage")
        return values

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        folder = init_settings()["state_dir"]
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=Path(folder) / CONFIG_FILE)


def state_folder(chosen: Path | str | None = None) -> Path:
    """The state folder: ``chosen``, else KEEPSTEP_STATE_DIR, else the user's; absolute, not created."""
    folder = chosen or os.environ.get("KEEPSTEP_STATE_DIR") or platformdirs.user_state_path("keepstep")
    return Path(folder).expanduser().absolute()


def load(state_dir: Path | str | None = None, **chosen: Any) -> Settings:
    """Settings for a state folder; ``chosen`` values that are not None win over environment and file. Raises SettingsError."""
    folder = state_folder(state_dir)
    try:
        return Settings(state_dir=folder, **{key: value for key, value in chosen.items() if value is not None})
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors(include_url=False, include_input=False)]
        raise SettingsError(f"bad settings (from KEEPSTEP_* or {folder / CONFIG_FILE}):\n  " + "\n  ".join(lines)) from error
    except ValueError as error:  # not TOML at all
        raise SettingsError(f"{folder / CONFIG_FILE} cannot be read: {error}") from error


def prepare_state_dir(folder: Path) -> None:
    """Make the state folder, closed to other users. Raises SettingsError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "no write permission")
    except OSError as error:
        raise SettingsError(f"state folder {folder} cannot be used ({error.strerror}); choose another with --state-dir") from error


def access_token(settings: Settings) -> str:
    """The server's token; made on first use and stored with mode 0600. Raises SettingsError."""
    if settings.token is not None:
        return settings.token.get_secret_value()
    path = settings.state_dir / TOKEN_FILE
    if not path.exists():
        fresh = path.with_name(f"{TOKEN_FILE}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(fresh, path)  # of two first starts one wins, and both then read the same token
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    path.chmod(0o600)
    token = stored_token(settings.state_dir)
    if token is None or len(token) < MIN_TOKEN:
        raise SettingsError(f"{path} holds no token of at least {MIN_TOKEN} characters; remove the file to get a new one")
    return token


def stored_token(folder: Path) -> str | None:
    """The token in a state folder; None when there is none yet."""
    try:
        return (folder / TOKEN_FILE).read_text().strip() or None
    except FileNotFoundError:
        return None
