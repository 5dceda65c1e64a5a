"""PURE: what failures cost. Each class has its own budget; the same failure again and again without a step gained ends the job early.

Invariant: a failure is written down before it is judged, so counters grow by one per failure whatever follows.
"""

from __future__ import annotations

from dataclasses import replace

from workers.group import Group
from workers.messages import Failure, FailureClass
from workers.verdict import Verdict

OUT_OF_MEMORY_BUDGET = 3
# Same failure without a step gained: how many in a row end the job.
NO_PROGRESS = {
    FailureClass.USER: 2,
    FailureClass.OUT_OF_MEMORY: 2,
    FailureClass.UNKNOWN: 3,
    FailureClass.INFRASTRUCTURE: 6,
    FailureClass.PREEMPTION: 20,
}


def charge(group: Group, now: float, verdict: Verdict) -> tuple[Group, tuple[str, str] | None]:
    """Write the failure into the budget; (reason, message) when it must not restart."""
    step = group.best_step if group.attached else None
    failure = Failure(now, verdict.kind, verdict.cause, verdict.signature, step)
    window = tuple(f for f in group.failures if now - f.at <= group.spec.window_s)
    failures = (*window, failure)
    group = replace(group, failures=failures)
    same = 0
    for f in reversed(failures):
        if f.signature != failure.signature or f.step != failure.step:
            break
        same += 1
    limit = NO_PROGRESS[verdict.kind]
    knows_progress = group.attached or verdict.kind in (FailureClass.USER, FailureClass.OUT_OF_MEMORY)
    own_budget = {FailureClass.USER: group.spec.max_user_errors, FailureClass.OUT_OF_MEMORY: OUT_OF_MEMORY_BUDGET}
    budget = own_budget.get(verdict.kind, group.spec.max_infrastructure)
    pays = _pays_with(verdict.kind)
    spent = sum(_pays_with(f.kind) == pays for f in failures)
    if spent > budget:
        if verdict.kind == FailureClass.USER:
            return group, ("UserError", f"{verdict.evidence} (max_user_errors = {budget})")
        message = f"{spent} failures within {group.spec.window_s / 3600:g} h, the budget is {budget}; last: {verdict.evidence}"
        return group, ("BudgetSpent", message)
    if same >= limit and knows_progress:
        return group, ("NoProgress", f"the same failure {same} times in a row without a step gained: {verdict.evidence}")
    return group, None


def _pays_with(kind: FailureClass) -> FailureClass:
    """Unknown failures and preemptions draw on the infrastructure budget."""
    return kind if kind in (FailureClass.USER, FailureClass.OUT_OF_MEMORY) else FailureClass.INFRASTRUCTURE
