"""Opaque cursors: the key of the last row of a page, so that rows inserted meanwhile never shift a page. PURE."""

from __future__ import annotations

import base64
import binascii
import json

from orchestrator.ports import BadCursor

Key = tuple[int | float | str, ...]


def encode(kind: str, key: Key) -> str:
    """A cursor of list ``kind`` that continues after ``key``."""
    return base64.urlsafe_b64encode(json.dumps([kind, *key], separators=(",", ":")).encode()).decode().rstrip("=")


def decode(kind: str, cursor: str, shape: tuple[type, ...]) -> Key:
    """The key in ``cursor``. Raises BadCursor unless ``encode`` made it for the same list, with a key of ``shape``."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        made_for, *key = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, TypeError, binascii.Error):
        made_for, key = None, []
    if made_for != kind or tuple(map(type, key)) != shape or not all(map(_storable, key)):
        raise BadCursor(f"cursor: not one of the list of {kind}; take next_cursor of the page before, unchanged, or leave it out")
    return tuple(key)


def _storable(part: int | float | str) -> bool:
    """No key holds what the databases cannot."""
    if isinstance(part, str):
        return part.isascii() and part.isprintable()
    return abs(part) < 2**63  # neither NaN nor infinite
