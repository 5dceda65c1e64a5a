"""Jobs: submit, plan, list, get, cancel, delete, drill."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from api.body import documented as body
from api.body import json_body
from api.context import Cursor, Here, Limit, Ref
from api.errors import FieldProblem, documented, invalid
from api.schemas import JobOut, Page, PlanOut
from orchestrator.core.spec import JobSpec, LabelName, LabelValue, dump
from orchestrator.core.states import JobState
from orchestrator.service import Fault

router = APIRouter(prefix="/jobs", tags=["jobs"])
LABELS = TypeAdapter(dict[LabelName, LabelValue])


class CancelRequest(BaseModel):
    """How to cancel."""

    model_config = ConfigDict(extra="forbid", strict=True)
    grace_s: float | None = Field(
        None, ge=0, le=3600, allow_inf_nan=False, description="Seconds between SIGTERM and SIGKILL, 0 to 3600; null: the spec's."
    )


class DrillRequest(BaseModel):
    """A real fault to inject."""

    model_config = ConfigDict(extra="forbid", strict=True)
    fault: Fault = Field(
        description="kill: SIGKILL to the rank; stop: SIGSTOP to it; hang: its main thread pauses for ever; oom: it takes memory in a "
        "small cgroup until the kernel kills it, or raises MemoryError where no cgroup can be made; exit: the rank exits by itself; "
        "agent: its node's agent dies; corrupt_checkpoint: a byte of the newest whole checkpoint is changed in storage, whatever the rank."
    )
    rank: int = Field(0, ge=0, lt=4096, description="Rank to hit, 0 to world size - 1, at most 4095.")


class DrillOut(BaseModel):
    """What a drill did."""

    message: str


Submitted = Annotated[JobSpec, Depends(json_body(JobSpec))]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="Makes a repeated submit give the same job; 1 to 200 printable ASCII characters. Never expires.",
    ),
]


@router.post(
    "", status_code=201, summary="Submit a job", response_model=JobOut,
    responses={200: {"model": JobOut, "description": "The job that this key and body made before"}, **documented(409, 413, 422)},
    openapi_extra=body(JobSpec),
)  # fmt: skip
def submit(here: Here, spec: Submitted, response: Response, key: Key = None) -> JobOut:
    """Takes the job spec as body. 201 for a new job; 200 with the same job for the same key and body; 409 for the same key with another."""
    job, created = here.service.submit(spec, idempotency_key=key, body_hash=fingerprint(spec))
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return JobOut.of(job, here.now())


def fingerprint(spec: JobSpec) -> str:
    """Equal for specs that mean the same, whatever their spelling in the body."""
    return hashlib.sha256(json.dumps(dump(spec), sort_keys=True).encode()).hexdigest()


@router.post("/plan", summary="What would happen to a job", responses=documented(413, 422), openapi_extra=body(JobSpec))
def plan(here: Here, spec: Submitted) -> PlanOut:
    """Validates the spec and tells where it would be placed now, or why it would wait. Changes nothing."""
    return PlanOut.of(here.service.plan(spec))


@router.get("", summary="List jobs", responses=documented(422))
def jobs(
    here: Here,
    limit: Limit = 50,
    cursor: Cursor = None,
    state: Annotated[JobState | None, Query(description=f"Only jobs in this state: {', '.join(JobState)}.")] = None,
    label: Annotated[
        list[Annotated[str, StringConstraints(max_length=264)]] | None,
        Query(max_length=16, description="`name=value`, each up to 264 characters, up to 16 times with different names: all must match."),
    ] = None,
) -> Page[JobOut]:
    """Newest first."""
    page, following = here.service.jobs(state, _labels(label or []), limit, cursor)
    return Page[JobOut](items=[JobOut.of(job, here.now()) for job in page], next_cursor=following)


def _labels(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    bad = [text for text, (name, equals, value) in zip(given, pairs, strict=True) if not (equals and _possible(name, value))]
    if bad:
        message = f"{bad[0][:100]!r} must have the form name=value, of a name and a value that a job may have"
        raise invalid([FieldProblem(field="label", message=message)])
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise invalid([FieldProblem(field="label", message="one name may be asked for once, since a job has one value of it")])
    return {name: value for name, _, value in pairs}


def _possible(name: str, value: str) -> bool:
    try:
        LABELS.validate_python({name: value})
    except ValidationError:
        return False
    return True


@router.get("/{ref}", summary="Get a job", responses=documented(404, 422))
def job(here: Here, ref: Ref) -> JobOut:
    """By id, or by name."""
    return JobOut.of(here.service.job(ref), here.now())


@router.post(
    "/{ref}/cancel", summary="Cancel a job", responses=documented(404, 409, 413, 422), openapi_extra=body(CancelRequest, required=False)
)
def cancel(here: Here, ref: Ref, request: Annotated[CancelRequest, Depends(json_body(CancelRequest, required=False))]) -> JobOut:
    """Idempotent; a shorter grace still counts. Ranks get SIGTERM, then SIGKILL after the grace; 409 when the job ended otherwise."""
    return JobOut.of(here.service.cancel(ref, request.grace_s), here.now())


@router.delete("/{ref}", status_code=204, summary="Delete a job", responses=documented(404, 409, 422))
def delete(here: Here, ref: Ref) -> None:
    """An ended job, by its id: checkpoints, logs and history go with it, and cannot be had back. 409 while it lives or keeps a pinned
    checkpoint."""
    here.service.delete(ref)


@router.post("/{ref}/drills", summary="Inject a real fault", responses=documented(404, 409, 413, 422), openapi_extra=body(DrillRequest))
def drill(here: Here, ref: Ref, request: Annotated[DrillRequest, Depends(json_body(DrillRequest))]) -> DrillOut:
    """Shows that recovery works, on a job of yours that runs. The incident it makes is marked as a drill."""
    return DrillOut(message=here.service.drill(ref, request.fault, request.rank))


def component_models() -> list[type[Any]]:
    """Models that OpenAPI must know although routes read their bodies themselves."""
    return [JobSpec, CancelRequest, DrillRequest]
