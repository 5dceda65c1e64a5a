"""Reads a job spec from a file on the client, and turns its ``working_dir`` into an uploaded bundle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from api.client import Client
from api.packing import pack
from orchestrator.core.spec import JobSpec
from orchestrator.core.spec_errors import problems


class JobFileError(Exception):
    """The file cannot be used; ``lines`` has one entry for each problem."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class _Loader(yaml.SafeLoader):
    """YAML without dates: they have no place in JSON, and `name: 2026-01-31` means the text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(path: Path) -> tuple[dict[str, Any], Path | None]:
    """(spec as the server takes it, folder to upload or None). Raises JobFileError with one line for each bad field."""
    spec = _parsed(path)
    base = Path.cwd() if str(path) == "-" else path.parent
    folder = spec.pop("working_dir", None)
    if folder is not None and not (isinstance(folder, str) and folder):
        raise JobFileError("working_dir: must be a path, relative to the job file")
    if folder is not None and spec.get("bundle") is not None:
        raise JobFileError("working_dir: give either working_dir or bundle, not both")
    try:
        JobSpec.model_validate(spec)
    except ValidationError as error:
        raise JobFileError(*(f"{p.field}: {p.message}" if p.field else p.message for p in problems(error))) from error
    return spec, None if folder is None else base / Path(folder).expanduser()


def with_bundle(client: Client, spec: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The spec with its code uploaded. Raises PackingError before anything is sent."""
    if folder is None:
        return spec
    packed = pack(folder)
    with packed.file:
        client.upload(packed.sha256, packed.file)
    return {**spec, "bundle": packed.sha256}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
        spec = _loaded(text)
    except OSError as error:
        raise JobFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobFileError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(spec, dict):
        raise JobFileError(f"{path}: must be a mapping of fields such as name, framework, command")
    return spec


def _loaded(text: str) -> Any:
    """JSON by its own rules: YAML would not join the halves of an escaped emoji."""
    try:
        return json.loads(text)
    except ValueError:
        return yaml.load(text, _Loader)
