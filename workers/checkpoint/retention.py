"""Which checkpoints may go. PURE.

Invariant: nothing goes while none is verified; the newest verified one and all that are newer stay, at least two that are not known to be
damaged stay, and so does every one that is in use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

KEEP_AT_LEAST = 2


def to_remove(
    newest_first: Sequence[str], keep_last: int, verified: Collection[str], in_use: Collection[str], damaged: Collection[str] = ()
) -> list[str]:
    """URLs to remove, oldest first. ``verified``: their bytes were read back and hold; ``in_use``: being restored; ``damaged``: known not
    to hold, so that they do not count among the ``keep_last``."""
    sound = [url for url in newest_first if url not in damaged]
    proven = next((i for i, url in enumerate(sound) if url in verified), None)
    if proven is None:
        return []
    kept = sound[: max(KEEP_AT_LEAST, keep_last, proven + 1)]
    if len(kept) == len(sound):
        return []
    oldest_kept = newest_first.index(kept[-1])
    return [url for url in reversed(newest_first[oldest_kept + 1 :]) if url not in in_use]
