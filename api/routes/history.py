"""What happened to a job: attempts, ranks, incidents, events."""

from __future__ import annotations

from fastapi import APIRouter

from api.context import Cursor, Here, Limit, Ref
from api.errors import documented
from api.schemas import AttemptOut, EventOut, IncidentOut, Page, RankOut
from api.slices import page_of

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


@router.get("/events", summary="History of a job")
def events(here: Here, ref: Ref, limit: Limit = 50, cursor: Cursor = None) -> Page[EventOut]:
    """Oldest first."""
    items, following = here.service.events(ref, limit, cursor)
    return Page[EventOut](items=[EventOut.of(event) for event in items], next_cursor=following)
