"""PURE: what failures cost. Each class has its own budget; the same failure again and again without a step gained ends the job early.

Invariant: a failure is written down before it is judged, so counters grow by one per failure whatever follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from workers.group import Group
from workers.messages import Failure, FailureClass, GroupSpec
from workers.verdict import Verdict

OUT_OF_MEMORY_BUDGET = 3
DISK_FULL_BUDGET = 3
BACK_OFF_S = 1.0  # after the first failure that gained no step; doubled with each one that follows
BACK_OFF_LONGEST_S = 60.0
QUICK_S = 30.0  # of a script that reports no steps: an equal failure sooner than this after the last counts as one that gained nothing


# Reasons of their own for user errors that end a job.
USER_REASONS = {"incomplete": "Incomplete", "non_finite": "NonFinite"}


class Limits(Protocol):
    """What the user set, in the spec of a job or of a group."""

    @property
    def max_user_errors(self) -> int: ...
    @property
    def max_infrastructure(self) -> int: ...


@dataclass(frozen=True)
class Price:
    """A row of the table. ``same``: so many equal failures in a row, without a step gained, end the job."""

    paid_by: FailureClass  # the class whose failures are counted together
    budget: Callable[[Limits], int]  # restarts within the window
    same: int
    without_steps: bool = False  # whether ``same`` holds for scripts that report no steps too
    remedy: Callable[[GroupSpec], str] = lambda spec: ""  # what the user can do about it


def _more_memory(spec: GroupSpec) -> str:
    asked = f"resources.memory_gb asks for {spec.memory_gb:g} GiB on each node"
    return f"; {asked}: raise it and the limit of the node, or lower the batch size, the data loader workers or the prefetch"


def _more_room(spec: GroupSpec) -> str:
    return "; make room there, or point checkpoint.storage or TMPDIR to a larger disk"


TABLE: dict[FailureClass, Price] = {
    FailureClass.USER: Price(FailureClass.USER, lambda s: s.max_user_errors, same=2, without_steps=True),
    FailureClass.OUT_OF_MEMORY: Price(FailureClass.OUT_OF_MEMORY, lambda s: OUT_OF_MEMORY_BUDGET, 2, True, _more_memory),
    FailureClass.DISK_FULL: Price(FailureClass.DISK_FULL, lambda s: DISK_FULL_BUDGET, 2, True, _more_room),
    FailureClass.INFRASTRUCTURE: Price(FailureClass.INFRASTRUCTURE, lambda s: s.max_infrastructure, same=6),
    FailureClass.UNKNOWN: Price(FailureClass.INFRASTRUCTURE, lambda s: s.max_infrastructure, same=3),
    FailureClass.PREEMPTION: Price(FailureClass.INFRASTRUCTURE, lambda s: s.max_infrastructure, same=20),
}


def charge(group: Group, now: float, verdict: Verdict) -> tuple[Group, tuple[str, str] | None]:
    """Write the failure into the budget; (reason, message) when it must not restart. The group learns when the next start may be."""
    price, spec = TABLE[verdict.kind], group.spec
    step = group.best_step if group.attached else None
    failure = Failure(now, verdict.kind, verdict.cause, verdict.signature, step)
    failures = (*(f for f in group.failures if now - f.at <= spec.window_s), failure)
    same = _same(failures)
    group = replace(group, failures=failures, not_before=now + back_off(same if group.attached else _quick(failures, verdict)))
    spent, budget = sum(TABLE[f.kind].paid_by == price.paid_by for f in failures), price.budget(spec)
    if spent > budget and verdict.kind == FailureClass.USER:
        return group, (USER_REASONS.get(verdict.cause, "UserError"), f"{verdict.evidence} (max_user_errors = {budget})")
    if spent > budget:
        text = f"{spent} failures within {spec.window_s / 3600:g} h, the budget is {budget}; last: {verdict.evidence}{price.remedy(spec)}"
        return group, ("BudgetSpent", text)
    knows_progress = group.attached or price.without_steps or verdict.cause == "hang"
    if same >= price.same and knows_progress:
        text = f"the same failure {same} times in a row without a step gained: {verdict.evidence}{price.remedy(spec)}"
        return group, ("NoProgress", text)
    return group, None


def back_off(same: int) -> float:
    """Seconds to wait before the next start, after so many equal failures in a row without a step gained."""
    return 0.0 if same < 2 else min(BACK_OFF_S * 2.0 ** (same - 2), BACK_OFF_LONGEST_S)


def _quick(failures: tuple[Failure, ...], newest: Verdict) -> int:
    """How many of the newest are equal and came one soon after the other: the sign of a script that cannot run."""
    quick = 1
    if newest.from_outside:
        return quick
    for earlier, later in zip(failures[-2::-1], failures[:0:-1], strict=False):
        if earlier.signature != later.signature or later.at - earlier.at > QUICK_S:
            break
        quick += 1
    return quick


def _same(failures: tuple[Failure, ...]) -> int:
    """How many of the newest are the newest again, at the same step."""
    newest, same = failures[-1], 0
    for f in reversed(failures):
        if f.signature != newest.signature or f.step != newest.step:
            break
        same += 1
    return same
