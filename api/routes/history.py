"""What happened to a job: attempts, ranks, incidents, events."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from api import eventstream
from api.context import Cursor, Here, Limit, Ref
from api.errors import documented
from api.schemas import AttemptOut, EventOut, IncidentOut, Page, RankOut
from api.slices import page_of

EVENTS = "text/event-stream"
MAX_ID = 2**63 - 1
router = APIRouter(prefix="/jobs/{ref}", tags=["history"], responses=documented(404, 422))


@router.get("/attempts", summary="Placements of a job")
def attempts(here: Here, ref: Ref, limit: Limit = 50, cursor: Cursor = None) -> Page[AttemptOut]:
    """In order."""
    items, following = page_of(here.service.attempts(ref), limit, cursor)
    return Page[AttemptOut](items=[AttemptOut.of(attempt) for attempt in items], next_cursor=following)


@router.get("/ranks", summary="Training processes of a job")
def ranks(here: Here, ref: Ref, limit: Limit = 50, cursor: Cursor = None) -> Page[RankOut]:
    """Of the newest attempt, by rank."""
    items, following = page_of(here.service.ranks(ref), limit, cursor)
    return Page[RankOut](items=[RankOut.of(rank) for rank in items], next_cursor=following)


@router.get("/incidents", summary="Failures and recoveries of a job")
def incidents(here: Here, ref: Ref, limit: Limit = 50, cursor: Cursor = None) -> Page[IncidentOut]:
    """Oldest first."""
    items, following = here.service.incidents(ref, limit, cursor)
    return Page[IncidentOut](items=[IncidentOut.of(incident) for incident in items], next_cursor=following)


@router.get(
    "/events", summary="History of a job", response_model=Page[EventOut],
    responses={200: {"description": "A page, or with `Accept: text/event-stream` events `event` and `end`", "content": {EVENTS: {}}}},
)  # fmt: skip
async def events(
    here: Here,
    ref: Ref,
    limit: Limit = 50,
    cursor: Cursor = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[
        int | None, Header(alias="Last-Event-ID", ge=0, le=MAX_ID, description="Continue an event stream behind this id, 0 to 2^63 - 1.")
    ] = None,
) -> Page[EventOut] | StreamingResponse:
    """Oldest first. As an event stream it goes on until the job has ended; `limit` and `cursor` then mean nothing."""
    if EVENTS in accept:
        job = await asyncio.to_thread(here.service.job, ref)
        stream = eventstream.as_events(here.service, job.id, last_event_id or 0)
        return StreamingResponse(stream, media_type=EVENTS, headers={"Cache-Control": "no-store"})
    items, following = await asyncio.to_thread(here.service.events, ref, limit, cursor)
    return Page[EventOut](items=[EventOut.of(event) for event in items], next_cursor=following)
