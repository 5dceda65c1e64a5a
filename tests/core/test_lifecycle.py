"""Each rule of the lifecycle: what is seen -> the job's state, its reason, the attempt's state and the action."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.actions import Action, CreateGroup, EndGroup, JobStep, RemoveGroup
from orchestrator.core.group_spec import group_spec
from orchestrator.core.lifecycle import ABSENT_S, END_MARGIN_S, START_MARGIN_S, decide, place, taken_down
from orchestrator.core.model import Attempt, GroupView, Job
from orchestrator.core.scheduling import Placement
from orchestrator.core.states import AttemptState as A
from orchestrator.core.states import Desired
from orchestrator.core.states import JobState as S
from orchestrator.core.verdicts import budgets
from tests.core.make import ABSENT, NOW, ROOTS, SILENT, UNKNOWN, attempt, job, seen, spec
from workers.messages import (
    CheckpointRecord,
    Failure,
    FailureClass,
    GroupEvent,
    GroupPhase,
    Incident,
    NodePlace,
    Outcome,
    Source,
)

CANCEL = {"desired": Desired.CANCEL, "attempt": 1}
GONE = attempt(absent_since=NOW - ABSENT_S)
REMOVE, END = RemoveGroup("job-aaaaaaaaaaaa", 1), EndGroup("job-aaaaaaaaaaaa", 1, 30)


def look(job: Job, attempt: Attempt | None, view: GroupView | None, removed: bool = False, now: float = NOW) -> JobStep:
    return decide(job, attempt, view, removed, now, ROOTS)


def short(step: JobStep) -> tuple[Any, ...]:
    actions: tuple[Action | str, ...] = tuple("create" if isinstance(a, CreateGroup) else a for a in step.actions)
    return (step.job.state, step.job.reason, step.attempt.state if step.attempt else None, *actions)


def running(**changes: Any) -> Job:
    return job(S.RUNNING, **{"reason": "Training", "message": "so it is", "attempt": 1, "started_at": NOW - 40, **changes})


def ended(outcome: Outcome, **changes: Any) -> GroupView:
    return seen(GroupPhase.ENDED, outcome=outcome, **{"reason": "Completed", "ended_at": NOW - 5, **changes})


PHASES = [
    (GroupPhase.PLACING, S.STARTING, "Placed"),
    (GroupPhase.WARMING, S.STARTING, "Warming"),
    (GroupPhase.STARTING, S.STARTING, "Launched"),
    (GroupPhase.RUNNING, S.RUNNING, "Training"),
    (GroupPhase.RECOVERING, S.RECOVERING, "Recovering"),
    (GroupPhase.ENDING, S.STARTING, "Placed"),
]


@pytest.mark.parametrize(("phase", "state", "reason"), PHASES)
def test_a_group_phase_shows_as_a_job_state(phase: GroupPhase, state: S, reason: str) -> None:
    step = look(job(S.STARTING, reason="Placed", attempt=1), attempt(A.PLANNED), seen(phase))
    assert short(step) == (state, reason, A.ACTIVE)


STARTING, RUNNING, ASKED, UNSEEN = job(S.STARTING, attempt=1), running(), running(**CANCEL), running(unreachable_since=NOW - 3600)
PLANNED, ACTIVE = attempt(A.PLANNED), attempt()
CANCELLING, TRAINING, LEAVES = (S.CANCELLING, "CancelRequested"), (S.RUNNING, "Training"), (A.REMOVING, REMOVE)
RULES: list[tuple[str, Job, Attempt | None, GroupView | None, bool, tuple[Any, ...]]] = [
    ("cancel while it waits", job(desired=Desired.CANCEL), None, None, False, (S.CANCELLED, "Cancelled", None)),
    ("cancel between attempts", job(**CANCEL), attempt(A.ENDED), None, False, (S.CANCELLED, "Cancelled", A.ENDED)),
    ("waits on", job(), None, None, False, (S.PENDING, "Submitted", None)),
    ("the group is not there yet", STARTING, PLANNED, ABSENT, False, (S.STARTING, "Submitted", A.PLANNED, "create")),
    ("half of it is there", STARTING, PLANNED, SILENT, False, (S.STARTING, "Submitted", A.PLANNED, "create")),
    ("Ray is away while it is made", STARTING, PLANNED, UNKNOWN, False, (S.STARTING, "Submitted", A.PLANNED)),
    ("a new coordinator collects its agents", RUNNING, ACTIVE, seen(GroupPhase.WARMING), False, (S.RECOVERING, "Recovering", A.ACTIVE)),
    ("an old report is no news", running(), attempt(report_version=9), seen(GroupPhase.WARMING), False, (*TRAINING, A.ACTIVE)),
    ("old reports for an hour", UNSEEN, attempt(report_version=9), seen(), False, (S.RUNNING, "Unreachable", A.ACTIVE)),
    ("silent: left alone", RUNNING, ACTIVE, SILENT, False, (*TRAINING, A.ACTIVE)),
    ("silent for an hour: left alone", UNSEEN, ACTIVE, SILENT, False, (S.RUNNING, "Unreachable", A.ACTIVE)),
    ("Ray away for an hour: left alone", UNSEEN, ACTIVE, UNKNOWN, False, (S.RUNNING, "Unreachable", A.ACTIVE)),
    ("absent once: looked at again", RUNNING, ACTIVE, ABSENT, False, (*TRAINING, A.ACTIVE)),
    ("absent for long: lost", running(), GONE, ABSENT, False, (S.RECOVERING, "GroupLost", *LEAVES)),
    ("succeeded, still there", RUNNING, ACTIVE, ended(Outcome.SUCCEEDED), False, (*TRAINING, *LEAVES)),
    ("lost, says the coordinator", RUNNING, ACTIVE, ended(Outcome.LOST), False, (S.RECOVERING, "GroupLost", *LEAVES)),
    ("stopped, but nobody asked", RUNNING, ACTIVE, ended(Outcome.STOPPED), False, (S.RECOVERING, "GroupLost", *LEAVES)),
    ("cancel", ASKED, ACTIVE, seen(), False, (*CANCELLING, A.ENDING, END)),
    ("cancel of a group that was never made", job(S.STARTING, **CANCEL), PLANNED, ABSENT, False, (*CANCELLING, *LEAVES)),
    ("cancel of a silent group", ASKED, ACTIVE, SILENT, False, (*CANCELLING, A.ENDING, END)),
    ("cancelled, but it had succeeded", ASKED, ACTIVE, ended(Outcome.SUCCEEDED), False, (*TRAINING, *LEAVES)),
    ("cancelled while a lost one is removed", ASKED, attempt(A.REMOVING, outcome=Outcome.LOST), ABSENT, True, (*CANCELLING, *LEAVES)),
    ("removal is not complete", running(), attempt(A.REMOVING), ABSENT, False, (*TRAINING, *LEAVES)),
    ("removed, but a late call made it again", running(), attempt(A.REMOVING), seen(), True, (*TRAINING, *LEAVES)),
    ("a final job whose attempt was left", job(S.FAILED, attempt=1), attempt(), seen(), False, (S.FAILED, "Submitted", *LEAVES)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "last", "view", "removed", "expected"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_rules(before: Job, last: Attempt | None, view: GroupView | None, removed: bool, expected: tuple[Any, ...]) -> None:
    assert short(look(before, last, view, removed)) == expected


LOST = {"outcome": Outcome.LOST, "reason": "NodeLost", "message": "a node is gone"}
INFRA = tuple(Failure(NOW - n, FailureClass.INFRASTRUCTURE, "signal", "signal", 1) for n in range(3))
OLD = tuple(replace(f, at=NOW - 90_000) for f in INFRA)
TWO = spec(restart={"max_infrastructure": 2})
AFTER = [
    ("succeeded", running(), {"outcome": Outcome.SUCCEEDED}, S.SUCCEEDED, "Completed"),
    ("succeeded although cancel was asked", job(S.CANCELLING, **CANCEL), {"outcome": Outcome.SUCCEEDED}, S.SUCCEEDED, "Completed"),
    ("failed", running(), {"outcome": Outcome.FAILED, "reason": "UserError"}, S.FAILED, "UserError"),
    ("cancelled", job(S.CANCELLING, **CANCEL), {"outcome": Outcome.STOPPED}, S.CANCELLED, "Cancelled"),
    ("cancelled, and failed at the SIGTERM", job(S.CANCELLING, **CANCEL), {"outcome": Outcome.FAILED}, S.CANCELLED, "Cancelled"),
    ("cancelled and lost", job(S.CANCELLING, **CANCEL), LOST, S.CANCELLED, "Cancelled"),
    ("failed before the cancel", running(**CANCEL), {"outcome": Outcome.FAILED, "reason": "UserError"}, S.FAILED, "UserError"),
    ("ran too long", running(), {"outcome": Outcome.STOPPED, "reason": "RunTimeout"}, S.FAILED, "RunTimeout"),
    ("lost", running(), LOST, S.PENDING, "GroupLost"),
    ("lost, budget spent", running(spec=TWO, failures=INFRA), LOST, S.FAILED, "BudgetSpent"),
    ("lost, budget just not spent", running(spec=TWO, failures=INFRA[:2]), LOST, S.PENDING, "GroupLost"),
    ("lost, failures outside the window", running(spec=TWO, failures=OLD), LOST, S.PENDING, "GroupLost"),
]


@pytest.mark.parametrize(("before", "facts", "state", "reason"), [row[1:] for row in AFTER], ids=[row[0] for row in AFTER])
def test_a_job_goes_on_only_when_nothing_is_left(before: Job, facts: dict[str, Any], state: S, reason: str) -> None:
    last = attempt(A.REMOVING, ended_at=NOW - 5, **facts)
    before = replace(before, state=S.RECOVERING if facts is LOST and before.state is S.RUNNING else before.state)
    assert look(before, last, ABSENT, removed=False).attempt == last
    step = look(before, last, ABSENT, removed=True)
    assert (step.job.state, step.job.reason, step.attempt and step.attempt.state) == (state, reason, A.ENDED)
    assert step.actions == ()
    assert step.job.ended_at == (None if state is S.PENDING else NOW if state is S.CANCELLED else NOW - 5)


@pytest.mark.parametrize(
    ("stalled", "number", "state", "reason"),
    [(2, 4, S.FAILED, "NoProgress"), (1, 9, S.PENDING, "GroupLost"), (2, 3, S.PENDING, "GroupLost")],
)
def test_a_job_without_progress_is_given_up(stalled: int, number: int, state: S, reason: str) -> None:
    before = job(S.RECOVERING, attempt=number, stalled=stalled)
    step = look(before, attempt(A.REMOVING, number=number, **LOST), ABSENT, removed=True)
    assert (step.job.state, step.job.reason) == (state, reason)


@pytest.mark.parametrize(
    ("best", "prior", "started", "stalled"),
    [(10, 5, NOW, 0), (5, 5, NOW, 2), (10, None, NOW, 0), (None, None, NOW, 0), (None, None, None, 2)],
    ids=["gained", "none gained", "first steps", "a script without steps that ran", "never ran"],
)
def test_losses_without_a_step_gained_are_counted(best: int | None, prior: int | None, started: float | None, stalled: int) -> None:
    lost = attempt(absent_since=NOW - ABSENT_S, prior_best_step=prior, started_at=started)
    assert look(running(best_step=best, stalled=1), lost, ABSENT).job.stalled == stalled


def test_a_vanished_group_leaves_an_incident_that_its_successor_closes() -> None:
    step = look(running(step=6, best_step=7), GONE, ABSENT)
    (incident,) = step.incidents
    assert (incident.cause, incident.action, incident.at, incident.last_step) == ("group_lost", "relaunch", NOW - ABSENT_S, 7)
    assert step.job.open_incidents == (incident,)
    assert [f.cause for f in step.job.failures] == ["group_lost"]
    trains = seen(attempt=2, started_at=NOW + 9, resumed_step=5, restored_from=Source.STORAGE, step=6, best_step=7)
    later = look(replace(step.job, state=S.STARTING, attempt=2), attempt(number=2), trains, now=NOW + 10)
    (closed,) = later.incidents
    assert (closed.recovered_at, closed.resumed_step, closed.lost_steps, closed.restored_from) == (NOW + 9, 5, 2, Source.STORAGE)
    assert closed.recovery_seconds == 9 + ABSENT_S
    assert later.job.open_incidents == ()


def test_an_incident_closes_also_when_its_successor_trained_unseen() -> None:
    open_incident = Incident("job-aaaaaaaaaaaa", 1, 0, NOW - 90, "group_lost", FailureClass.INFRASTRUCTURE, "gone", "relaunch", last_step=7)
    before = job(S.STARTING, attempt=2, open_incidents=(open_incident,))
    waits = look(before, attempt(A.PLANNED, number=2), seen(GroupPhase.WARMING, attempt=2))
    assert waits.job.open_incidents == (open_incident,)
    view = ended(Outcome.SUCCEEDED, attempt=2, started_at=NOW - 60, resumed_step=5)
    step = look(before, attempt(A.PLANNED, number=2), view)
    (closed,) = step.incidents
    assert (step.job.open_incidents, closed.attempt, closed.recovered_at, closed.lost_steps) == ((), 1, NOW - 60, 2)


def test_a_cluster_that_is_ended_on_purpose_costs_a_job_nothing() -> None:
    step = taken_down(running(best_step=40), attempt(A.ACTIVE), NOW)
    assert step is not None
    assert short(step) == (S.RECOVERING, "TakenDown", A.REMOVING)
    again = look(step.job, step.attempt, ABSENT, removed=True)
    assert short(again) == (S.PENDING, "GroupLost", A.ENDED)
    assert (again.job.failures, again.job.open_incidents, again.job.stalled, step.incidents) == ((), (), 0, ())


@pytest.mark.parametrize(
    ("before", "last"),
    [(job(S.PENDING), None), (ASKED, attempt(A.ENDING)), (RUNNING, attempt(A.REMOVING)), (job(S.STARTING, attempt=1), attempt(A.PLANNED))],
)
def test_what_does_not_run_is_not_taken_down(before: Job, last: Attempt | None) -> None:
    assert taken_down(before, last, NOW) is None


def test_a_step_is_what_the_restored_state_has_until_there_is_a_newer_one() -> None:
    before, now_at = running(step=150, best_step=160), attempt(A.ACTIVE)
    restored = look(before, now_at, seen(GroupPhase.RECOVERING, step=None, resumed_step=100, best_step=160)).job
    assert (restored.step, restored.best_step) == (100, 160)
    assert look(before, now_at, seen(GroupPhase.WARMING, step=None, resumed_step=None)).job.step == 150


def test_what_a_lost_attempt_had_not_recovered_from_is_closed_with_it() -> None:
    killed = Incident("job-aaaaaaaaaaaa", 1, 0, NOW - 5, "signal", FailureClass.INFRASTRUCTURE, "killed", "restart_in_place", last_step=7)
    recovers = look(running(), attempt(), seen(GroupPhase.RECOVERING, generation=1, incidents=(killed,)))
    assert recovers.job.open_incidents == (killed,)
    lost = look(recovers.job, replace(GONE, generation=1), ABSENT)
    assert [i.cause for i in lost.job.open_incidents] == ["signal", "group_lost"]
    trains = seen(attempt=2, started_at=NOW + 9, resumed_step=5)
    later = look(replace(lost.job, state=S.STARTING, attempt=2), attempt(number=2), trains, now=NOW + 10)
    assert [(i.cause, i.recovered_at) for i in later.incidents] == [("signal", NOW + 9), ("group_lost", NOW + 9)]
    assert later.job.open_incidents == ()


def test_absence_must_last() -> None:
    first = look(running(), attempt(), ABSENT)
    assert (first.attempt and first.attempt.absent_since, first.job.look_again_at) == (NOW, NOW + ABSENT_S)
    for view in (SILENT, UNKNOWN, seen()):
        between = look(first.job, first.attempt, view, now=NOW + 1)
        assert between.attempt is not None
        assert between.attempt.absent_since is None


def test_silence_is_told_once_and_taken_back() -> None:
    step = look(running(), attempt(), SILENT)
    assert (step.job.unreachable_since, step.events) == (NOW, ())
    step = look(step.job, step.attempt, SILENT, now=NOW + 10)
    assert [e.reason for e in step.events] == ["Unreachable"]
    assert "last seen 2027-01-15T08:00:00Z" in step.job.message
    assert not look(step.job, step.attempt, SILENT, now=NOW + 70).changed
    back = look(step.job, step.attempt, seen(), now=NOW + 71)
    assert (short(back), back.job.unreachable_since) == ((S.RUNNING, "Training", A.ACTIVE), None)


def test_a_group_that_does_not_end_is_removed_after_grace_and_margin() -> None:
    ending = attempt(A.ENDING, ending_since=NOW - 5 - END_MARGIN_S)
    before = job(S.CANCELLING, grace_s=5.0, **CANCEL)
    assert short(look(before, ending, SILENT, now=NOW - 1))[2:] == (A.ENDING, EndGroup("job-aaaaaaaaaaaa", 1, 5))
    assert short(look(before, ending, SILENT))[2:] == (A.REMOVING, REMOVE)


def test_a_run_ends_after_run_hours() -> None:
    limited = running(spec=spec(timeouts={"run_hours": 1.0}), started_at=NOW - 3600)
    assert look(limited, attempt(), seen(), now=NOW - 1).job.look_again_at == NOW
    step = look(limited, attempt(), seen())
    assert step.attempt is not None
    assert (step.attempt.state, step.attempt.reason, step.actions) == (A.ENDING, "RunTimeout", (END,))
    step = look(step.job, step.attempt, ended(Outcome.STOPPED, message="ended on request"))
    assert step.attempt is not None
    assert (step.attempt.state, step.attempt.reason) == (A.REMOVING, "RunTimeout")
    step = look(step.job, step.attempt, ABSENT, removed=True)
    assert (step.job.state, step.job.reason) == (S.FAILED, "RunTimeout")
    assert step.job.message == "ran longer than timeouts.run_hours = 1"
    waits = look(replace(limited, state=S.PENDING), attempt(A.ENDED), None)
    assert (waits.job.state, waits.job.reason) == (S.FAILED, "RunTimeout")


@pytest.mark.parametrize(
    ("last", "view"), [(attempt(A.PLANNED), SILENT), (attempt(A.PLANNED), ABSENT), (attempt(), seen(GroupPhase.PLACING))]
)
def test_a_group_that_never_gets_ready_is_placed_again(last: Attempt, view: GroupView) -> None:
    deadline = last.created_at + 600 + START_MARGIN_S
    assert look(job(S.STARTING, attempt=1), last, view, now=deadline - 1).job.state is S.STARTING
    step = look(job(S.STARTING, attempt=1), last, view, now=deadline)
    assert short(step) == (S.RECOVERING, "GroupLost", A.REMOVING, REMOVE)
    assert step.attempt is not None
    assert step.attempt.reason == "StartTimeout"
    assert [f.cause for f in step.job.failures] == ["start_timeout"]


def test_a_report_is_taken_in_once() -> None:
    checkpoint = CheckpointRecord("job-aaaaaaaaaaaa", 1, 3, 40, "/c/40", 1, 1, 1, NOW, 0.1)
    incident = Incident("job-aaaaaaaaaaaa", 1, 2, NOW, "signal", FailureClass.INFRASTRUCTURE, "killed", "restart_in_place")
    view = seen(
        generation=3, step=41, best_step=44, metrics={"loss": 0.5}, failures=INFRA[:1], incidents=(incident,), checkpoints=(checkpoint,),
        events=(GroupEvent(8, NOW, "RankFailed", "rank 1 was killed", 2, 1),), pruned=("/c/10",), started_at=NOW - 30,
    )  # fmt: skip
    step = look(running(best_step=43, failures=INFRA[1:2]), attempt(), view)
    assert (step.job.step, step.job.best_step, step.job.generation, step.job.restarts) == (41, 44, 3, 3)
    assert step.job.metrics == {"loss": 0.5}
    assert step.job.failures == (INFRA[1], INFRA[0])
    assert (step.incidents, step.checkpoints, step.pruned) == ((incident,), (checkpoint,), ("/c/10",))
    assert [(e.source, e.source_seq, e.rank) for e in step.events] == [("attempt-1", 8, 1)]
    assert not look(step.job, step.attempt, view).changed


def test_an_outcome_counts_whatever_its_version() -> None:
    view = ended(Outcome.SUCCEEDED, version=2, best_step=50)
    step = look(running(best_step=40), attempt(report_version=9), view)
    assert (step.job.best_step, step.attempt and step.attempt.state) == (50, A.REMOVING)


def test_a_new_attempt_counts_on() -> None:
    before = job(attempt=1, generation=4, best_step=30, failures=INFRA, spec=spec(bundle="a" * 64, timeouts={"hang_s": 9, "silence_s": 7}))
    step = place(before, attempt(A.ENDED), Placement((NodePlace(0, "n7"),)), NOW, ROOTS)
    assert short(step) == (S.STARTING, "Placed", A.PLANNED, "create")
    (create,) = step.actions
    assert isinstance(create, CreateGroup)
    made = create.spec
    assert (made.attempt, made.first_generation, made.prior_failures, made.prior_best_step) == (2, 5, INFRA, 30)
    assert (made.storage_url, made.bundle_url, made.hang_s, made.silence_s) == (
        f"/storage/jobs/{before.id}",
        f"/storage/bundles/{'a' * 64}.zip",
        9,
        7,
    )


def test_two_attempts_at_once_are_impossible() -> None:
    with pytest.raises(AssertionError, match="has not ended"):
        place(job(attempt=1), attempt(A.REMOVING), Placement(()), NOW, ROOTS)


def test_what_cannot_be_removed_is_told_of_a_job_that_has_not_ended() -> None:
    last = attempt(A.REMOVING, outcome=Outcome.SUCCEEDED)
    step = decide(running(), last, ABSENT, False, NOW, ROOTS, "node n1 did not sweep in time")
    assert short(step) == (S.RUNNING, "NotRemoved", *LEAVES)
    assert "cannot be removed yet: node n1 did not sweep in time" in step.job.message
    assert not decide(step.job, last, ABSENT, False, NOW, ROOTS, "node n1 did not sweep in time").changed
    final = job(S.FAILED, attempt=1)
    assert decide(final, last, ABSENT, False, NOW, ROOTS, "node n1 did not sweep in time").job == final
    assert look(step.job, last, ABSENT, removed=True).job.state is S.SUCCEEDED


def test_a_final_job_stays_as_it_is() -> None:
    for state in (S.SUCCEEDED, S.FAILED, S.CANCELLED):
        step = look(job(state, desired=Desired.CANCEL), attempt(A.ENDED), None)
        assert not step.changed
        step = look(job(state), attempt(A.REMOVING), ABSENT, removed=True)
        assert (step.job.state, step.attempt and step.attempt.state) == (state, A.ENDED)


def test_both_budgets_are_told_each_by_its_payer() -> None:
    kinds = [FailureClass.USER, FailureClass.INFRASTRUCTURE, FailureClass.UNKNOWN, FailureClass.PREEMPTION, FailureClass.OUT_OF_MEMORY]
    failures = (*(Failure(NOW - 60, k, "x", "x", 1) for k in kinds), Failure(NOW - 90_000, FailureClass.USER, "x", "old", 1))
    told = budgets(job(failures=failures, spec=spec(restart={"max_user_errors": 2, "max_infrastructure": 9})), NOW)
    assert told == {
        FailureClass.USER: (1, 2),
        FailureClass.OUT_OF_MEMORY: (1, 3),
        FailureClass.DISK_FULL: (0, 3),
        FailureClass.INFRASTRUCTURE: (3, 9),
    }


def test_what_success_asks_for_reaches_the_group() -> None:
    asked = spec(success={"steps": 500, "files": ["out.pt"]}, restart={"stop_on_nan": True})
    made = group_spec(job(attempt=1, spec=asked), attempt(), ROOTS)
    assert (made.success_steps, made.success_files, made.stop_on_nan) == (500, ("out.pt",), True)
