"""What a coordinator is told about an attempt, made from the job and its placement. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.model import Attempt, Job
from orchestrator.core.spec import JobSpec
from workers.messages import GroupSpec

HOUR = 3600.0


@dataclass(frozen=True)
class Roots:
    """Where jobs and bundles live: an absolute path or URL without a slash at its end."""

    jobs: str
    bundles: str


def storage_url(job_id: str, spec: JobSpec, roots: Roots) -> str:
    """The job's own folder; one folder belongs to one job."""
    return f"{(spec.checkpoint.storage or roots.jobs).rstrip('/')}/{job_id}"


def bundle_url(sha256: str, roots: Roots) -> str:
    return f"{roots.bundles}/{sha256}.zip"


def group_spec(job: Job, attempt: Attempt, roots: Roots) -> GroupSpec:
    """``attempt`` must be the newest of ``job``; the same pair always gives the same spec while the attempt is PLANNED."""
    spec, resources, checkpoint = job.spec, job.spec.resources, job.spec.checkpoint
    snapshot, hang = checkpoint.snapshot_every_steps, spec.timeouts.hang_s
    by_steps, by_time = checkpoint.every_steps, checkpoint.every_seconds
    return GroupSpec(
        job_id=job.id,
        attempt=attempt.number,
        framework=spec.framework,
        strategy=spec.strategy,
        command=spec.command,
        env=dict(spec.env),
        nodes=attempt.nodes,
        processes_per_node=resources.processes_per_node,
        cpus_per_node=resources.cpus_per_node,
        gpus_per_node=resources.gpus_per_node,
        memory_gb=resources.memory_gb,
        devices_per_node=resources.devices_per_node,
        bundle_url=None if spec.bundle is None else bundle_url(spec.bundle, roots),
        storage_url=storage_url(job.id, spec, roots),
        every_steps=None if by_steps == "auto" else by_steps,
        every_seconds=None if by_time == "auto" else by_time,
        auto_checkpoints="auto" in (by_steps, by_time),
        keep_last=checkpoint.keep_last,
        snapshot_every_steps=None if snapshot == "auto" else snapshot,
        max_user_errors=spec.restart.max_user_errors,
        max_infrastructure=spec.restart.max_infrastructure,
        window_s=spec.restart.window_hours * HOUR,
        start_s=spec.timeouts.start_s,
        hang_s=None if hang == "auto" else hang,
        success_steps=spec.success.steps,
        success_files=spec.success.files,
        stop_on_nan=spec.restart.stop_on_nan,
        silence_s=spec.timeouts.silence_s,
        first_generation=attempt.first_generation,
        prior_failures=job.failures,
        prior_best_step=job.best_step,
        committed_step=job.checkpoint_step or 0,
    )
