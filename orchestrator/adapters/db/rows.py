"""Dataclass to row and back, for every table the same way.

Invariant: ``value(cls, table, row(table, x)) == x`` for text that both databases can hold; other characters (NUL, lone surrogates: raw
program output) are replaced by their escapes, so that no output of a rank can make a write fail.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, to_json
from sqlalchemy import Table

from orchestrator.core.model import Attempt, Checkpoint, Event, Job
from orchestrator.core.spec import JobSpec
from workers.messages import Incident

T = TypeVar("T")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {cls: TypeAdapter(cls) for cls in (Job, Attempt, Event, Incident, Checkpoint)}


def row(table: Table, value: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """Column values of ``value``, of the columns ``names`` only where they are given; columns that it has no field for are left out, and an
    ``id`` that the database is yet to give."""
    columns = _columns(table)
    wanted = columns if names is None else names
    fields = ((name, columns[name], getattr(value, name)) for name in wanted if hasattr(value, name))
    return {name: _encoded(item) if json_text else clean(item) for name, json_text, item in fields if not (name == "id" and item is None)}


def value(cls: type[T], table: Table, columns: Mapping[str, Any]) -> T:
    """The ``cls`` that ``row`` made ``columns`` from. Raises ValueError (pydantic's) where a row does not make sense."""
    json_text = _columns(table)
    fields = {name: _decoded(name, item) if json_text[name] else item for name, item in columns.items()}
    made: T = _ADAPTERS[cls].validate_python(fields)
    return made


@cache
def _columns(table: Table) -> dict[str, bool]:
    """Name of each column, and whether it holds JSON."""
    return {column.name: bool(column.info.get("json")) for column in table.columns}


def clean(item: Any) -> Any:
    """``item``, or its text with the characters escaped that a text column cannot hold."""
    if not isinstance(item, str):
        return item
    text = str(item)
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _encoded(item: Any) -> str:
    try:
        return to_json(item, inf_nan_mode="strings").decode()
    except PydanticSerializationError:
        return to_json(_scrubbed(item), inf_nan_mode="strings").decode()


def _scrubbed(item: Any) -> Any:
    if is_dataclass(item) and not isinstance(item, type):
        item = asdict(item)
    if isinstance(item, Mapping):
        return {clean(key): _scrubbed(inner) for key, inner in item.items()}
    if isinstance(item, list | tuple):
        return [_scrubbed(inner) for inner in item]
    return clean(item)


def _decoded(name: str, text: str) -> Any:
    # The spec's types are strict: from JSON a list may become a tuple, from Python objects it may not.
    return _spec(text) if name == "spec" else json.loads(text)


@lru_cache(maxsize=5000)  # a pass reads all open jobs, and a spec never changes
def _spec(text: str) -> JobSpec:
    return JobSpec.model_validate_json(text)
