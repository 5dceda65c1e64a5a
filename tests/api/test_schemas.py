"""What is shown of a rank that failed."""

from __future__ import annotations

from api.schemas import RankOut
from workers.messages import ErrorReport, RankReport, RankState


def test_a_ranks_exception_is_shown_as_text() -> None:
    error = ErrorReport("ValueError", "no", "Traceback ...", "train.py:3 in main", ours=True)
    shown = RankOut.of(RankReport(0, 0, "n0", 0, 1, 17, RankState.EXITED, exit_code=1, error=error))
    assert shown.error == {"type": "ValueError", "message": "no", "traceback": "Traceback ...", "place": "train.py:3 in main"}
