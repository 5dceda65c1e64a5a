"""Every refusal as problem+json (RFC 9457) with a stable ``code``.

Invariants: a client can decide by ``status`` and ``code`` alone; 422 has one entry for each bad field; 503 says when to try again; an
unexpected error never shows its inside to the client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from orchestrator.adapters.storage.bundles import BundleTooLarge
from orchestrator.adapters.storage.zipcheck import BadBundle
from orchestrator.core.spec_errors import sentence
from orchestrator.ports import BadCursor, Conflict, KeyReused, Unavailable
from orchestrator.service import NotFound, Refused

log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2
NAMED, TOLD = 20, 100  # bad fields in a sentence, and in all


class FieldProblem(BaseModel):
    """One bad field."""

    field: str = Field(description="Dotted name, such as `resources.nodes`; empty for the whole body.", examples=["resources.nodes"])
    message: str = Field(description="What is wrong, the limit and the remedy.")


class Problem(BaseModel):
    """The body of every answer from 400 on."""

    type: str = Field(default="about:blank", description="Always about:blank; `code` tells the kinds apart.")
    title: str = Field(description="The HTTP status in words.")
    status: int = Field(description="The HTTP status.")
    code: str = Field(description="Stable token for programs.", examples=["job_not_found"])
    detail: str = Field(description="What happened and what to do, in a sentence.")
    errors: list[FieldProblem] = Field(default_factory=list, description="With 422: one entry for each bad field, at most 100.")


TITLES = {
    400: "Bad request", 401: "Not authenticated", 404: "Not found", 405: "Method not allowed", 409: "Conflict", 411: "Length required",
    413: "Content too large", 415: "Unsupported media type", 422: "Invalid input", 500: "Internal error", 503: "Not available now",
}  # fmt: skip
OF_SPEC = {"bundle_not_found": "bundle", "storage_unusable": "checkpoint.storage"}
CODES = {401: "not_authenticated", 404: "no_such_route", 405: "method_not_allowed"}


class ApiProblem(Exception):
    """A refusal that the HTTP layer itself decides."""

    def __init__(self, status: int, code: str, detail: str, errors: Sequence[FieldProblem] = ()) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.errors = status, code, detail, list(errors)


def invalid(errors: Sequence[FieldProblem]) -> ApiProblem:
    """422 with its fields."""
    names = ", ".join(error.field or "the body" for error in errors[:NAMED])
    more = f" and {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    return ApiProblem(422, "invalid_input", f"not accepted: {names}{more}", errors[:TOLD])


def answer(
    status: int, code: str, detail: str, errors: Sequence[FieldProblem] = (), headers: Mapping[str, str] | None = None
) -> JSONResponse:
    problem = Problem(title=TITLES.get(status, "Error"), status=status, code=code, detail=detail, errors=list(errors))
    return JSONResponse(problem.model_dump(), status, media_type=MEDIA_TYPE, headers=dict(headers or {}))


def documented(*statuses: int) -> dict[int | str, dict[str, object]]:
    """The ``responses`` of a route for OpenAPI; 401 and 503 belong to all."""
    return {
        status: {"description": TITLES[status], "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
        for status in sorted({401, 503, *statuses})
    }


def _descriptions(request: Request) -> dict[str, str | None]:
    """Of the parameters that the request's route takes, by name."""
    taken = request.scope["route"].dependant
    return {field.alias: field.field_info.description for field in (*taken.path_params, *taken.query_params, *taken.header_params)}


def install(app: FastAPI) -> None:
    """Turn every exception that reaches the edge into an answer."""

    @app.exception_handler(ApiProblem)
    async def _api(_: Request, error: ApiProblem) -> JSONResponse:
        return answer(error.status, error.code, error.detail, error.errors)

    @app.exception_handler(NotFound)
    async def _not_found(_: Request, error: NotFound) -> JSONResponse:
        return answer(404, error.code, str(error))

    @app.exception_handler(Refused)
    async def _refused(_: Request, error: Refused) -> JSONResponse:
        field = OF_SPEC.get(error.code)
        if field is not None:  # the spec is what is wrong, not the state of a job
            return answer(422, error.code, str(error), [FieldProblem(field=field, message=str(error).removeprefix(f"{field}: "))])
        return answer(409, error.code, str(error))

    @app.exception_handler(KeyReused)
    async def _reused(_: Request, __: KeyReused) -> JSONResponse:
        detail = "this Idempotency-Key came before with another body; take a new key for a new job"
        return answer(409, "idempotency_key_reused", detail)

    @app.exception_handler(Conflict)
    async def _conflict(_: Request, __: Conflict) -> JSONResponse:
        return answer(409, "changed_meanwhile", "the job changed while this was being saved; send the request again")

    @app.exception_handler(BadCursor)
    async def _cursor(_: Request, error: BadCursor) -> JSONResponse:
        return await _api(_, invalid([FieldProblem(field="cursor", message=str(error).removeprefix("cursor: "))]))

    @app.exception_handler(Unavailable)
    async def _unavailable(_: Request, error: Unavailable) -> JSONResponse:
        return answer(503, "unavailable", f"{error}; try again", headers={"Retry-After": str(RETRY_AFTER_S)})

    @app.exception_handler(BadBundle)
    async def _bundle(_: Request, error: BadBundle) -> JSONResponse:
        if isinstance(error, BundleTooLarge):
            return answer(413, "bundle_too_large", str(error))
        return answer(422, "bad_bundle", str(error), [FieldProblem(field="bundle", message=str(error))])

    @app.exception_handler(RequestValidationError)
    async def _parameters(request: Request, error: RequestValidationError) -> JSONResponse:
        allowed = _descriptions(request)
        found: dict[str, str] = {}
        for item in error.errors():
            field = str(item["loc"][1])
            found.setdefault(field, sentence(item, allowed.get(field)))
        return await _api(request, invalid([FieldProblem(field=field, message=message) for field, message in found.items()]))

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, CODES.get(error.status_code, "refused"), str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(500, "internal_error", "the server failed at this request; its log has the cause")
