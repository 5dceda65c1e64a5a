"""What the routes work with, and the parameters that several of them take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Path, Query, Request

from orchestrator.adapters.storage.bundles import Bundles
from orchestrator.adapters.storage.logs import LogStore
from orchestrator.core.figures import Figures
from orchestrator.core.model import Job
from orchestrator.reconciler import Work
from orchestrator.service import Service


@dataclass(frozen=True)
class Context:
    """``ping``, ``last_pass_at`` and ``figures`` raise Unavailable; ``work`` is that of this server's reconciler, ``last_pass_at`` of the
    one that leads."""

    service: Service
    bundles: Bundles
    logs_of: Callable[[Job], LogStore]
    ping: Callable[[], None]
    work: Callable[[], Work]
    last_pass_at: Callable[[], float | None]
    figures: Callable[[], Figures]
    now: Callable[[], float]


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


Here = Annotated[Context, Depends(_context)]
Ref = Annotated[
    str, Path(min_length=1, max_length=200, description="Job id, or name, 1 to 200 characters: then its newest job, an active one first.")
]
Limit = Annotated[int, Query(ge=1, le=200, description="Most items on the page, 1 to 200.")]
Cursor = Annotated[str | None, Query(max_length=500, description="`next_cursor` of the page before, at most 500 characters.")]
