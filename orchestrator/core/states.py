"""Job and attempt states, reasons and allowed transitions, as tables. PURE."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    PENDING = "PENDING"  # waits for room
    STARTING = "STARTING"  # has an attempt, no rank trains yet
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"  # a failure was seen, training has not resumed
    SUSPENDED = "SUSPENDED"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self in FINAL


FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

_S = JobState
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.SUSPENDED, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.RECOVERING, _S.PENDING, _S.SUSPENDED, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.PENDING, _S.SUSPENDED, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.STARTING, _S.PENDING, _S.SUSPENDED, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.SUSPENDED: frozenset({_S.PENDING, _S.CANCELLED}),
    # All ranks may have ended with 0 before the cancel reached them: then the job did succeed.
    _S.CANCELLING: frozenset({_S.CANCELLED, _S.SUCCEEDED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


class Desired(StrEnum):
    """What the user wants of a job; written by the service only."""

    RUN = "RUN"
    CANCEL = "CANCEL"


class AttemptState(StrEnum):
    """PLANNED: saved, its group is being made. ACTIVE: its coordinator answers. ENDING: told to end. REMOVING: its outcome is known, its
    actors and placement group are being removed. ENDED: nothing of it is left."""

    PLANNED = "PLANNED"
    ACTIVE = "ACTIVE"
    ENDING = "ENDING"
    REMOVING = "REMOVING"
    ENDED = "ENDED"


_A = AttemptState
ATTEMPT_TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    _A.PLANNED: frozenset({_A.ACTIVE, _A.ENDING, _A.REMOVING}),
    _A.ACTIVE: frozenset({_A.ENDING, _A.REMOVING}),
    _A.ENDING: frozenset({_A.REMOVING}),
    _A.REMOVING: frozenset({_A.ENDED}),
    _A.ENDED: frozenset(),
}


class Reason(StrEnum):
    """Stable tokens that tell why a job is in its state."""

    SUBMITTED = "Submitted"
    WAITING_FOR_ROOM = "WaitingForRoom"
    WAITING_FOR_NODES = "WaitingForNodes"
    PLACED = "Placed"
    WARMING = "Warming"
    LAUNCHED = "Launched"
    TRAINING = "Training"
    RECOVERING = "Recovering"
    GROUP_LOST = "GroupLost"
    NOT_REMOVED = "NotRemoved"  # its attempt has an outcome, but something of it is still there
    TAKEN_DOWN = "TakenDown"  # the cluster was ended on purpose, its groups with it
    UNREACHABLE = "Unreachable"
    CANCEL_REQUESTED = "CancelRequested"
    CANCELLED = "Cancelled"
    COMPLETED = "Completed"
    USER_ERROR = "UserError"
    INCOMPLETE = "Incomplete"  # all ranks ended with 0 before what `success` asks for was reached
    NON_FINITE = "NonFinite"
    NO_PROGRESS = "NoProgress"
    BUDGET_SPENT = "BudgetSpent"
    NO_VALID_CHECKPOINT = "NoValidCheckpoint"
    START_TIMEOUT = "StartTimeout"
    RUN_TIMEOUT = "RunTimeout"


def allowed(old: JobState, new: JobState) -> bool:
    """True where ``old`` may become ``new``; a state may always stay."""
    return old == new or new in TRANSITIONS[old]
