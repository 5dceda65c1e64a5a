"""Short ways to write down jobs, attempts, nodes and reports for the tables of the core tests."""

from __future__ import annotations

from typing import Any

from orchestrator.core.group_spec import Roots
from orchestrator.core.model import Attempt, GroupView, Job, Node, NodeState, Presence
from orchestrator.core.spec import JobSpec
from orchestrator.core.states import AttemptState, JobState
from workers.messages import GroupPhase, GroupReport, NodePlace

NOW = 1_800_000_000.0
ROOTS = Roots("/storage/jobs", "/storage/bundles")
ABSENT, SILENT, UNKNOWN = GroupView(Presence.ABSENT), GroupView(Presence.SILENT), GroupView(Presence.UNKNOWN)


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "framework": "plain", "command": ["true"], **changes})


def job(state: JobState = JobState.PENDING, id: str = "job-aaaaaaaaaaaa", **changes: Any) -> Job:
    fields = {"reason": "Submitted", "message": "", "created_at": NOW - 100, **changes}
    given = fields.pop("spec", None) or spec()
    return Job(id=id, name=given.name, spec=given, state=state, **fields)


def attempt(state: AttemptState = AttemptState.ACTIVE, number: int = 1, job_id: str = "job-aaaaaaaaaaaa", **changes: Any) -> Attempt:
    fields = {"nodes": (NodePlace(0, "n1"),), "created_at": NOW - 50, **changes}
    return Attempt(job_id, number, state, cpus_per_node=1, gpus_per_node=0, memory_gb=2, **fields)


def report(phase: GroupPhase = GroupPhase.RUNNING, version: int = 5, **changes: Any) -> GroupReport:
    fields = {"reason": "Why", "message": "so it is", "generation": 0, **changes}
    return GroupReport("job-aaaaaaaaaaaa", fields.pop("attempt", 1), version, fields.pop("generation"), phase, **fields)


def seen(phase: GroupPhase = GroupPhase.RUNNING, **changes: Any) -> GroupView:
    return GroupView(Presence.PRESENT, report(phase, **changes))


def node(id: str, cpus: float = 2, gpus: int = 0, memory_gb: float = 8, state: NodeState = NodeState.READY, **changes: Any) -> Node:
    free = {"free_cpus": cpus, "free_gpus": float(gpus), "free_memory_gb": memory_gb, **changes}
    return Node(id, id, "10.0.0.1", state, cpus, gpus, memory_gb, **free)
