"""What is wrong with a job spec or another body, told once for each bad field, with its limit and the remedy. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from orchestrator.core.spec import JobSpec

WHAT: dict[str, str] = {  # by pydantic's error type; the field's own description states the limit
    "missing": "is required",
    "int_type": "must be a whole number (no quotes, no fraction, not true or false)",
    "int_from_float": "must be a whole number (no fraction)",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is out of range",
    "bool_parsing": "must be true or false",
    "enum": "is not one of the known values",
    "float_type": "must be a number (no quotes, not true or false)",
    "finite_number": "must be a finite number",
    "string_type": "must be a string; put it into quotes",
    "string_unicode": "must be valid Unicode without lone surrogates",
    "tuple_type": "must be a list of strings",
    "dict_type": "must be a mapping of names to strings",
    "model_type": "must be a mapping; leave it out for the defaults",
    "model_attributes_type": "must be a mapping; leave it out for the defaults",
    "string_pattern_mismatch": "does not have the right form",
    "string_too_short": "is too short",
    "string_too_long": "is too long",
    "too_short": "has too few entries",
    "too_long": "has too many entries",
    "greater_than": "is out of range",
    "greater_than_equal": "is out of range",
    "less_than": "is out of range",
    "less_than_equal": "is out of range",
    "literal_error": "is not one of the known values",
    "none_required": "must be left out",
}


@dataclass(frozen=True)
class Problem:
    """``field`` is dotted, as in ``resources.nodes``; empty for the whole body. ``message`` names the value, the limit and the remedy."""

    field: str
    message: str


def problems(error: ValidationError, model: type[BaseModel] = JobSpec) -> list[Problem]:
    """One Problem for each bad field, in the order of the fields of ``model`` as pydantic found them."""
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        path, info, section = _locate(item["loc"], model)
        context = item.get("ctx", {})
        name = context.get("field") or ".".join(path)
        short_of_bad_entries = item["type"] == "too_short" and any(other.startswith(f"{name}.") for other in found)
        if name not in found and not short_of_bad_entries:  # the branches of a union each complain about the same field
            found[name] = Problem(name, _message(item, info, section))
    return list(found.values())


def _locate(loc: tuple[int | str, ...], section: type[BaseModel]) -> tuple[list[str], FieldInfo | None, type[BaseModel]]:
    """The dotted path of a location without pydantic's union tags, the field there, and the section that holds it."""
    path: list[str] = []
    for depth, part in enumerate(loc):
        path.append(str(part))
        info = section.model_fields.get(str(part))
        if info is None:
            return path, None, section
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            if depth + 1 == len(loc):
                return path, info, section
            section = info.annotation
            continue
        if get_origin(info.annotation) in (tuple, dict):
            path += [str(rest) for rest in loc[depth + 1 :] if rest != "[key]"]
        return path, info, section
    return path, None, section


def _message(item: Any, info: FieldInfo | None, section: type[BaseModel]) -> str:
    if item["type"] == "keepstep":
        return str(item["msg"])
    if item["type"] == "extra_forbidden":
        return f"unknown field; known here: {', '.join(section.model_fields)}"
    if item["type"] in ("model_type", "model_attributes_type") and info is None:
        return f"{'the job spec' if section is JobSpec else 'the body'} must be a mapping of fields"
    return sentence(item, info.description if info is not None else None)


def sentence(item: Any, allowed: str | None) -> str:
    """One of pydantic's errors; ``allowed``: the description of the field, which states its limit."""
    what = WHAT.get(item["type"], item["msg"])
    given = "" if item["type"] == "missing" else f", got {_short(item['input'])}"
    return f"{what}{given}" + (f". Allowed: {allowed}" if allowed else "")


def _short(value: object) -> str:
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
