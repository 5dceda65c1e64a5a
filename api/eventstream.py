"""Sends the history of a job as server-sent events, while it grows.

Invariants: every event is sent once, in order, with its id, from which another stream continues; each look is one short question to the
store, so no database session outlives it; a stream ends when the job is final and all that was recorded by then has been sent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from api.schemas import EventOut
from orchestrator.service import Service

POLL_S = 0.5
ALIVE_S = 15.0  # a comment after so long a silence, so that proxies and clients know that the stream lives
PAGE = 200


async def as_events(service: Service, job_id: str, since: int) -> AsyncIterator[bytes]:
    """``event`` for each one behind the id ``since``, at last ``end`` with the job's state."""
    sent_at = time.monotonic()
    while True:
        job = await asyncio.to_thread(service.job, job_id)  # first: what a final job has recorded is then there
        events = await asyncio.to_thread(service.events_after, job_id, since, PAGE)
        for event in events:
            assert event.id is not None
            since = event.id
            yield f"event: event\nid: {since}\ndata: {EventOut.of(event).model_dump_json()}\n\n".encode()
        if events:
            sent_at = time.monotonic()
        elif job.state.final:
            data = {"id": job.id, "state": job.state, "reason": job.reason, "message": job.message}
            yield f"event: end\ndata: {json.dumps(data)}\n\n".encode()
            return
        else:
            if time.monotonic() - sent_at >= ALIVE_S:
                sent_at = time.monotonic()
                yield b": waiting\n\n"
            await asyncio.sleep(POLL_S)
