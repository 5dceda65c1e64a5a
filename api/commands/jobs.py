"""submit, plan, ls, get, cancel, delete, wait, drill."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from api import jobfile
from api.client import Client, ref_path
from api.commands import show
from api.commands.follow import follow
from api.commands.options import AsJson, JobRef, SpecFile, StateDir
from api.server_record import ServerDown
from orchestrator.service import FAULTS

POLL_S = 0.5
FINAL = set(show.EXIT_CODES)


def submit(
    file: SpecFile,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Print the id and return.")] = False,
    wait_for: Annotated[bool, typer.Option("--wait", help="Wait for the end without logs.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Submit a job: prints its id, then follows its logs. Ctrl-C detaches and leaves the job alone.

    Exit code: 0 SUCCEEDED (or detached with -d), 1 FAILED, 3 CANCELLED, 2 not accepted.
    """
    spec, folder = jobfile.read(file)
    client = Client.find(state_dir)
    job = client.submit(jobfile.with_bundle(client, spec, folder))
    if as_json:
        show.as_json(job)
    else:
        print(job["id"], flush=True)
    if wait_for:
        _wait(state_dir, job["id"], None, as_json=False, quiet=True)
    elif not detach:
        raise typer.Exit(show.EXIT_CODES[follow(state_dir, job, as_json=as_json)])


def plan(file: SpecFile, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Check a job spec and show where it would run now, or why it would wait. Changes nothing."""
    spec, _ = jobfile.read(file)
    answer = Client.find(state_dir).post("/jobs/plan", spec)
    if as_json:
        show.as_json(answer)
    else:
        show.facts([("fits now", "yes" if answer["fits"] else "no"), ("reason", answer["reason"]), ("message", answer["message"]),
                    ("nodes", [node["node_id"] for node in answer["nodes"]])])  # fmt: skip


def ls(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="name=value; may be given several times, all must match.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Show at most so many; default: all.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """List jobs, newest first."""
    jobs = Client.find(state_dir).every("/jobs", state=state.upper() if state else None, label=label or None, limit=min(limit or 200, 200))
    chosen = [job for job, _ in zip(jobs, range(limit or 10**9), strict=False)]
    if as_json:
        show.items_as_json(chosen)
    else:
        show.table(
            ["ID", "NAME", "STATE", "REASON", "STEP", "RESTARTS", "CREATED"],
            [[j["id"], j["name"], j["state"], j["reason"], j["step"], j["restarts"], show.when(j["created_at"])] for j in chosen],
        )


def get(job: JobRef, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show a job."""
    found = Client.find(state_dir).get(ref_path(job))
    if as_json:
        show.as_json(found)
    else:
        _show(found)


def _show(job: dict[str, Any]) -> None:
    spec, need = job["spec"], job["spec"]["resources"]
    names = ["id", "name", "state", "reason", "message", "step", "best_step", "metrics", "restarts", "attempt", "generation"]
    show.facts(
        [(name, job[name]) for name in names]
        + [("budgets", ", ".join(f"{kind} {b['used']} of {b['limit']}" for kind, b in job["budgets"].items()))]
        + [("checkpoint_progress", job["checkpoint_progress"])]
        + [("command", " ".join(map(repr, spec["command"]))), ("framework", spec["framework"]), ("strategy", spec["strategy"])]
        + [
            ("ranks", f"{job['world_size']} (nodes {need['nodes']} x processes {need['processes_per_node']})"),
            ("priority", job["priority"]),
            ("labels", job["labels"]),
        ]
        + [(name.removesuffix("_at"), show.when(job[name])) for name in ("created_at", "started_at", "ended_at", "unreachable_since")]
    )


def cancel(
    job: JobRef,
    grace: Annotated[float | None, typer.Option(min=0, max=3600, help="Seconds between SIGTERM and SIGKILL; default: the spec's.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Ask for a job to be cancelled; `keepstep wait` tells when nothing of it runs. Asking again may shorten the grace."""
    found = Client.find(state_dir).post(ref_path(job, "cancel"), {} if grace is None else {"grace_s": grace})
    if as_json:
        show.as_json(found)
    elif found["state"] == "CANCELLED":
        print(f"{found['id']} CANCELLED: {found['message']}")
    else:
        print(f"{found['id']}: cancel requested, the job was {found['state']}")


def delete(
    job: Annotated[str, typer.Argument(metavar="JOB_ID", help="Job id; a name is not enough.")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Delete an ended job with its checkpoints, logs and history. It cannot be undone."""
    Client.find(state_dir).delete(ref_path(job))
    if as_json:
        show.as_json({"deleted": job})
    else:
        print(f"deleted {job}")


def wait(
    job: JobRef,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait at most; default: for ever.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Wait for the end of a job.

    Exit code: 0 SUCCEEDED, 1 FAILED, 3 CANCELLED, 4 the timeout passed, 2 anything else. A server that restarts meanwhile is waited for.
    """
    _wait(state_dir, job, timeout, as_json, quiet=False)


def _wait(state_dir: StateDir, ref: str, timeout: float | None, as_json: bool, quiet: bool) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    job: dict[str, Any] = Client.find(state_dir).get(ref_path(ref))
    while job["state"] not in FINAL:
        if deadline is not None and time.monotonic() >= deadline:
            show.remark(f"{job['id']} is still {job['state']} ({job['reason']}) after {timeout:g} s")
            raise typer.Exit(show.TIMED_OUT)
        time.sleep(POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic())))
        try:
            job = Client.find(state_dir).get(ref_path(job["id"]))
        except ServerDown:
            continue
    if as_json:
        show.as_json(job)
    elif not quiet or job["state"] != "SUCCEEDED":
        print(f"{job['id']} {job['state']}: {job['message']}")
    raise typer.Exit(show.EXIT_CODES[job["state"]])


def drill(
    job: JobRef,
    fault: Annotated[str, typer.Argument(metavar="FAULT", help=f"{', '.join(FAULTS[:-1])} or {FAULTS[-1]}.")],
    rank: Annotated[int, typer.Option(min=0, help="Rank to hit.")] = 0,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Inject a real fault into a running job, to see it recover."""
    done = Client.find(state_dir).post(ref_path(job, "drills"), {"fault": fault, "rank": rank})
    if as_json:
        show.as_json(done)
    else:
        print(done["message"])
