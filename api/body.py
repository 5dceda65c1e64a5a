"""Reads JSON bodies: bounded by the bytes that really come, strict, with one problem for each bad field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from api.errors import ApiProblem, FieldProblem, invalid
from orchestrator.core import spec_errors

MAX_JSON = 1024 * 1024  # bytes
Model = TypeVar("Model", bound=BaseModel)


def json_body(model: type[Model], required: bool = True) -> Callable[[Request], Awaitable[Model]]:
    """A dependency that reads ``model`` from the body; without ``required`` an empty body means all defaults."""

    async def read(request: Request) -> Model:
        body = await _bounded(request) or (b"" if required else b"{}")
        try:
            made = model.model_validate_json(body)
        except ValidationError as error:
            raise invalid(_problems(error, model)) from error
        if doubled := list(_doubled(json.loads(body, object_pairs_hook=_Pairs))):
            raise invalid([FieldProblem(field=name, message="occurs twice; every name may occur once, remove one") for name in doubled])
        return made

    return read


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it came: one name may be there twice, of which JSON readers take the first, the last or both."""


def _doubled(value: Any, path: str = "") -> Iterator[str]:
    """Dotted names; how deep they may lie, the validation before has bounded."""
    if isinstance(value, _Pairs):
        counts = Counter(name for name, _ in value)
        yield from (f"{path}{name}" for name, count in counts.items() if count > 1)
        inner: Iterable[tuple[object, Any]] = value
    else:
        inner = enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield from _doubled(item, f"{path}{name}.")


def documented(model: type[BaseModel], required: bool = True) -> dict[str, Any]:
    """The request body for ``openapi_extra``."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


async def _bounded(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON:
            raise ApiProblem(413, "body_too_large", f"a JSON body may have {MAX_JSON} bytes; put long text into a file of the bundle")
    return bytes(body)


def _problems(error: ValidationError, model: type[BaseModel]) -> list[FieldProblem]:
    if any(item["type"] == "json_invalid" for item in error.errors()):
        return [FieldProblem(field="", message=f"not valid JSON in UTF-8: {error.errors()[0]['msg']}")]
    return [FieldProblem(field=problem.field, message=problem.message) for problem in spec_errors.problems(error, model)]
