"""Logs of a job's ranks."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from api import logstream
from api.context import Here, Ref
from api.errors import ApiProblem, FieldProblem, documented, invalid
from orchestrator.core.model import Job
from orchestrator.ports import Unavailable

router = APIRouter(prefix="/jobs/{ref}", tags=["logs"])
EVENTS = "text/event-stream"
ANSWER = "Text, or with `Accept: text/event-stream` events `log`, `job` and `end`"


@router.get(
    "/logs", summary="Logs of a job", response_class=StreamingResponse,
    responses={
        200: {"description": ANSWER, "content": {"text/plain": {}, EVENTS: {}}},
        **documented(404, 422),
    },
)  # fmt: skip
async def logs(
    here: Here,
    ref: Ref,
    rank: Annotated[
        int | None, Query(ge=0, lt=4096, description="Only this rank, 0 to 4095; without it each line begins with `[rank N] `.")
    ] = None,
    generation: Annotated[
        int | None, Query(ge=0, lt=10**9, description="Only this generation, 0 to 10^9 - 1; default: all of the newest attempt.")
    ] = None,
    tail: Annotated[int | None, Query(ge=0, le=10_000, description="Newest lines per rank, 0 to 10000, at most 4 MiB.")] = None,
    follow: Annotated[bool, Query(description="true or false: go on until the job has ended.")] = False,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID", max_length=100_000, description="Continue an event stream behind this id, at most 100,000 characters."
        ),
    ] = None,
) -> StreamingResponse:
    """Output of the ranks. Bytes that are no UTF-8 are shown as U+FFFD. A tail begins in the newest generation that wrote anything."""
    job = await asyncio.to_thread(here.service.job, ref)
    _check_exists(job, rank, generation)

    def ask() -> Job:
        return here.service.job(job.id)

    wanted = logstream.Wanted(rank, generation, tail, follow)
    try:
        store = await asyncio.to_thread(here.logs_of, job)
        pieces = await logstream.begun(logstream.pieces(store, wanted, job, ask, _since(last_event_id)))
    except (OSError, ImportError) as error:
        raise Unavailable(f"storage: {error}") from error
    if EVENTS in accept:
        return StreamingResponse(logstream.as_events(pieces), media_type=EVENTS, headers={"Cache-Control": "no-store"})
    return StreamingResponse(logstream.as_text(pieces, prefixed=rank is None), media_type="text/plain; charset=utf-8")


def _check_exists(job: Job, rank: int | None, generation: int | None) -> None:
    size = job.spec.resources.world_size
    if rank is not None and rank >= size:
        raise ApiProblem(404, "rank_not_found", f"job {job.id} has ranks 0 to {size - 1}, not {rank}")
    if generation is not None and generation > job.generation:
        detail = f"generation {generation} of job {job.id} has not begun; the newest is {job.generation}"
        raise ApiProblem(404, "generation_not_found", detail)


def _since(last_event_id: str | None) -> logstream.Cursor | None:
    try:
        return logstream.parse_cursor(last_event_id) if last_event_id else None
    except ValueError as error:
        raise invalid([FieldProblem(field="Last-Event-ID", message=str(error))]) from error
