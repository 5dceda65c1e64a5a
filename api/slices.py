"""Pages of lists that are small enough to be read whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from api.errors import FieldProblem, invalid

Item = TypeVar("Item")


def page_of(items: Sequence[Item], limit: int, cursor: str | None) -> tuple[Sequence[Item], str | None]:
    """(page, next cursor); the cursor is a place in a list that only grows at its end. Raises 422 for a cursor that is none."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        raise invalid([FieldProblem(field="cursor", message="must be the `next_cursor` of a page of this list")])
    start = int(cursor or 0)
    return items[start : start + limit], str(start + limit) if start + limit < len(items) else None
