"""Jobs and what happens to them, with every field set to something that is not its default."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from orchestrator.core.actions import JobStep
from orchestrator.core.model import Attempt, Checkpoint, Event, Job
from orchestrator.core.spec import JobSpec
from orchestrator.core.states import AttemptState, Desired, JobState
from workers.messages import (
    CheckpointCheck,
    CheckpointRecord,
    ErrorReport,
    Failure,
    FailureClass,
    Incident,
    NodePlace,
    Outcome,
    RankPhase,
    RankReport,
    RankState,
    SaveProgress,
    Source,
)

T0 = 1_790_000_000.123456  # with more digits than a clock of microseconds keeps


def job_id(number: int) -> str:
    digits = "abcdefghijklmnopqrstuvwxyz234567"
    return "job-aaaaaaaa" + "".join(digits[number >> shift & 31] for shift in (15, 10, 5, 0))


def spec(name: str = "plain", **fields: Any) -> JobSpec:
    return JobSpec.model_validate_json(JobSpec(name=name, framework="plain", command=("./run",), **fields).model_dump_json())


def new_job(number: int = 0, **fields: Any) -> Job:
    fields = {"name": f"job {number}", "created_at": T0 + number} | fields
    fields.setdefault("spec", spec(fields["name"]))
    return Job(id=job_id(number), state=JobState.PENDING, reason="Submitted", message="waits", **fields)


def submitted(job: Job) -> Event:
    return Event(job.id, job.created_at, "Submitted", "submitted", source_seq=1)


def incident(job: Job, generation: int = 3, **fields: Any) -> Incident:
    full = Incident(
        job_id=job.id,
        attempt=2,
        generation=generation,
        at=T0 + 0.25,
        cause="signal",
        kind=FailureClass.INFRASTRUCTURE,
        message="rank 1 on local-1 was killed",
        action="restart_in_place",
        blamed_rank=1,
        blamed_node="ab12",
        exit_code=-9,
        signal=9,
        excerpt="Traceback …\n  训练🚀",
        stacks={0: "process 7 (S)\n  main thread\n    step (train.py:9)", 1: ""},
        drill="kill",
        last_step=2**40,
        resumed_step=2**40 - 1,
        lost_steps=1,
        restored_from=Source.MEMORY,
        phases_ms={"detect": 10.5, "stop": 0.1},
        recovery_seconds=0.123456789012345,
        recovered_at=T0 + 1 / 3,
    )
    return replace(full, **fields)


def checkpoint(job: Job, step: int, **fields: Any) -> CheckpointRecord:
    url = f"file:///store/{job.id}/step-{step}"
    return CheckpointRecord(
        **{"job_id": job.id, "attempt": 2, "generation": 3, "step": step, "url": url, "bytes": 2**45, "files": 7, "world_size": 4}
        | {"committed_at": T0 + 2.5, "write_seconds": 0.75, "finite": False}
        | fields
    )


def known(job: Job, step: int, **fields: Any) -> Checkpoint:
    """As it is read."""
    return Checkpoint(**asdict(checkpoint(job, step)), **fields)


def rank(number: int) -> RankReport:
    return RankReport(
        rank=number,
        node_index=1,
        node_id="cd34",
        local_rank=number,
        generation=3,
        pid=4242,
        state=RankState.RUNNING,
        phase=RankPhase.COMPILE,
        phase_at=T0,
        step=17,
        step_at=T0 + 0.1,
        step_seconds=0.01,
        step_slowest=0.02,
        exit_code=1,
        signal=15,
        ours=True,
        drill="stop",
        started_at=T0 - 5,
        ended_at=T0 + 5,
        error=ErrorReport("builtins.ValueError", "é", "Traceback", "train.py:3 in main"),
    )


def full_step(job: Job) -> JobStep:
    """What a busy pass saves, with all of a job's status set."""
    failure = Failure(T0, FailureClass.OUT_OF_MEMORY, "exit_code", "sig", 17)
    status = replace(
        job,
        state=JobState.RECOVERING,
        reason="Recovering",
        message="a rank was killed",
        attempt=2,
        generation=3,
        step=17,
        best_step=18,
        metrics={"loss": 0.1, "big": 1e300},
        failures=(failure, replace(failure, step=None)),
        restarts=4,
        stalled=1,
        checkpoint_step=40,
        open_incidents=(incident(job),),
        unreachable_since=T0 + 0.5,
        started_at=T0 + 0.75,
        ended_at=T0 + 9,
        look_again_at=T0 + 10,
        saving=SaveProgress(20, 5, 10),
    )
    attempt = Attempt(
        job_id=job.id,
        number=2,
        state=AttemptState.ENDING,
        nodes=(NodePlace(0, "ab12"), NodePlace(1, "cd34")),
        cpus_per_node=1.5,
        gpus_per_node=8,
        memory_gb=2.25,
        created_at=T0 + 1,
        first_generation=2,
        generation=3,
        report_version=2**33,
        events_seen=12,
        checkpoints_seen=1_800_000_000.5,
        checks_seen=1_800_000_000.75,
        prior_best_step=5,
        absent_since=T0 + 2,
        ending_since=T0 + 3,
        ranks=(rank(0), rank(1)),
        outcome=Outcome.LOST,
        reason="GroupLost",
        message="is gone",
        started_at=T0 + 1.5,
        ended_at=T0 + 8,
    )
    events = (Event(job.id, T0 + 4, "RankKilled", "killed", "attempt-2", 1, 2, 3, 1), Event(job.id, T0 + 5, "Recovering", "restarts"))
    url = checkpoint(job, 16).url
    checks = (CheckpointCheck(url, T0 + 6, None), CheckpointCheck(url, T0 + 7, "flipped é\0"))
    return JobStep(status, attempt, events, (incident(job),), (checkpoint(job, 16), checkpoint(job, 17)), checks=checks)


def ordered(job: Job) -> Job:
    """The job after its user asked for its end."""
    return replace(job, desired=Desired.CANCEL, grace_s=12.5)
