"""Is the server alive, is it doing its work, and which version is it."""

from __future__ import annotations

from importlib.metadata import version as installed

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from api.context import Here
from api.errors import RETRY_AFTER_S, documented
from orchestrator.ports import Unavailable
from workers.messages import SCHEMA

router = APIRouter(tags=["health"])
MAX_PASS_AGE_S = 30.0


class Health(BaseModel):
    status: str


class Ready(BaseModel):
    """Whether jobs are looked after."""

    ready: bool
    detail: str
    reconciler_pass_age_s: float | None = Field(description="Seconds since the reconciler finished a pass; null: not yet.")


class Version(BaseModel):
    version: str
    api: str = "v1"
    schema_version: int = Field(description="Of the messages between server and nodes.")


@router.get("/healthz", summary="Does the process answer?")
async def healthz() -> Health:
    """No token needed. Says nothing about the database or the cluster."""
    return Health(status="ok")


@router.get("/readyz", summary="Are jobs looked after?", responses={503: {"model": Ready, "description": "Not ready"}})
def readyz(here: Here) -> JSONResponse:
    """No token needed. Ready: the database answers and the reconciler of the server that leads finished a pass within 30 s."""
    age, detail = None, "the database answers and the reconciler works"
    try:
        here.ping()
        last = here.last_pass_at()
        age = None if last is None else max(0.0, here.now() - last)
    except Unavailable:
        detail = "the database does not answer"
    else:
        if age is None:
            detail = "the reconciler has not finished its first pass"
        elif age > MAX_PASS_AGE_S:
            detail = f"the reconciler has not finished a pass for {age:.0f} s; more than {MAX_PASS_AGE_S:.0f} s is too long"
        else:
            return JSONResponse(Ready(ready=True, detail=detail, reconciler_pass_age_s=age).model_dump())
    body = Ready(ready=False, detail=detail, reconciler_pass_age_s=age)
    return JSONResponse(body.model_dump(), 503, headers={"Retry-After": str(RETRY_AFTER_S)})


@router.get("/version", summary="Version of the server", responses=documented())
async def version() -> Version:
    """Needs the token."""
    return Version(version=installed("keepstep"), schema_version=SCHEMA)
