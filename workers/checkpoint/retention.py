"""Which checkpoints may go. PURE. Invariant: the newest verified one and all that are newer stay, and at least two stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence

KEEP_AT_LEAST = 2


def to_remove(newest_first: Sequence[str], keep_last: int, verified: Collection[str], in_use: Collection[str]) -> list[str]:
    """URLs to remove, oldest first. ``verified``: their bytes were read back and hold; ``in_use``: being restored. Nothing goes while
    none is verified."""
    proven = next((i for i, url in enumerate(newest_first) if url in verified), None)
    if proven is None:
        return []
    keep = max(KEEP_AT_LEAST, keep_last, proven + 1)
    return [url for url in reversed(newest_first[keep:]) if url not in in_use]
