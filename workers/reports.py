"""PURE: what a rank's board shows, taken into its report."""

from __future__ import annotations

import statistics
from dataclasses import replace

from workers.board import BoardView
from workers.messages import RankReport, RankState


def from_board(report: RankReport, seen: BoardView, await_step: int) -> RankReport:
    """``await_step``: the first step that is new, which no earlier generation has finished."""
    new = [at for step, at in seen.steps if step >= await_step]
    return replace(
        report,
        state=RankState.RUNNING if seen.step and report.state == RankState.LAUNCHED else report.state,
        phase=seen.phase,
        phase_at=seen.phase_at,
        step=seen.step or None,
        step_at=seen.step_at,
        step_seconds=statistics.median(seen.gaps) if seen.gaps else None,
        step_slowest=max(seen.gaps) if seen.gaps else None,
        started_at=seen.started_at,
        restored=seen.restored if seen.restored_at else None,
        restored_at=seen.restored_at,
        first_step_at=seen.first_step_at,
        new_step_at=report.new_step_at or (min(new) if new else None),
        failed_at=seen.failed_at,
        attached=seen.attached,
        nonfinite=tuple(seen.nonfinite.items()),
        nonfinite_since=seen.nonfinite_since or None,
    )


def urgent(report: RankReport) -> tuple[object, ...]:
    """What cannot wait for the next beat when it changes."""
    return (report.attached, report.first_step_at, report.new_step_at, report.failed_at, report.phase, report.restored_at, report.nonfinite)
