"""Reads JSON bodies: bounded by the bytes that really come, strict, with one problem for each bad field."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from api.errors import ApiProblem, FieldProblem, invalid
from orchestrator.core import spec_errors
from orchestrator.core.spec import JobSpec

MAX_JSON = 1024 * 1024  # bytes
Model = TypeVar("Model", bound=BaseModel)


def json_body(model: type[Model], required: bool = True) -> Callable[[Request], Awaitable[Model]]:
    """A dependency that reads ``model`` from the body; without ``required`` an empty body means all defaults."""

    async def read(request: Request) -> Model:
        body = await _bounded(request)
        try:
            return model.model_validate_json(body if body or required else b"{}")
        except ValidationError as error:
            raise invalid(_problems(error)) from error

    return read


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


def _problems(error: ValidationError) -> list[FieldProblem]:
    if any(item["type"] == "json_invalid" for item in error.errors()):
        return [FieldProblem(field="", message=f"not valid JSON in UTF-8: {error.errors()[0]['msg']}")]
    if error.title == JobSpec.__name__:
        return [FieldProblem(field=problem.field, message=problem.message) for problem in spec_errors.problems(error)]
    return [FieldProblem(field=".".join(map(str, item["loc"])), message=item["msg"]) for item in error.errors()]
