"""logs, events, incidents, attempts, ranks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from api.client import Client, ref_path
from api.commands import show
from api.commands.follow import follow as follow_log
from api.commands.follow import follow_events
from api.commands.options import AsJson, JobRef, Rank, StateDir


def logs(
    job: JobRef,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends; Ctrl-C detaches.")] = False,
    rank: Rank = None,
    generation: Annotated[int | None, typer.Option(min=0, help="Only this generation; default: all of the newest attempt.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, max=10000, help="Newest lines of each rank.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Print what the ranks wrote."""
    client = Client.find(state_dir)
    found = client.get(ref_path(job))
    if follow:
        follow_log(state_dir, found, rank, generation, tail, as_json)
        return
    if rank is None and found["world_size"] == 1:
        rank = 0  # nothing to tell apart
    with client.stream_text(ref_path(found["id"], "logs"), rank=rank, generation=generation, tail=tail) as chunks:
        if as_json:
            show.as_json({"text": "".join(chunks)})
        else:
            for chunk in chunks:
                sys.stdout.write(chunk)


def events(
    job: JobRef,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends; Ctrl-C detaches.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the history of a job, oldest first."""
    client = Client.find(state_dir)
    if follow:
        follow_events(state_dir, client.get(ref_path(job)), as_json)
        return
    items = list(client.every(ref_path(job, "events"), limit=200))
    if as_json:
        show.items_as_json(items)
    else:
        show.table(
            ["AT", "REASON", "ATTEMPT", "GEN", "MESSAGE"],
            [[show.when(e["at"]), e["reason"], e["attempt"], e["generation"], e["message"]] for e in items],
        )


Stacks = Annotated[bool, typer.Option("--stacks", help="Show the Python stacks that were taken of each hang.")]


def incidents(job: JobRef, stacks: Stacks = False, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show the failures of a job and how each was recovered, oldest first."""
    items = list(Client.find(state_dir).every(ref_path(job, "incidents"), limit=200))
    if as_json:
        show.items_as_json(items)
    else:
        show.table(
            ["AT", "CAUSE", "CLASS", "RANK", "ACTION", "LOST", "FROM", "SECONDS", "MESSAGE"],
            [
                [show.when(i["at"]), i["cause"], i["class"], i["blamed_rank"], i["action"], i["lost_steps"], i["restored_from"],
                 i["recovery_seconds"], i["message"]]
                for i in items
            ],
        )  # fmt: skip
        for incident in items if stacks else []:
            for rank, text in incident["stacks"].items():
                print(f"\ngeneration {incident['generation']}, rank {rank}:\n{text}")


def attempts(job: JobRef, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show the placements of a job."""
    items = list(Client.find(state_dir).every(ref_path(job, "attempts"), limit=200))
    if as_json:
        show.items_as_json(items)
    else:
        show.table(
            ["ATTEMPT", "STATE", "OUTCOME", "NODES", "CREATED", "ENDED", "MESSAGE"],
            [
                [a["attempt"], a["state"], a["outcome"], [n["node_id"][:8] for n in a["nodes"]], show.when(a["created_at"]),
                 show.when(a["ended_at"]), a["message"]]
                for a in items
            ],
        )  # fmt: skip


def ranks(job: JobRef, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show the training processes of a job."""
    items = list(Client.find(state_dir).every(ref_path(job, "ranks"), limit=200))
    if as_json:
        show.items_as_json(items)
    else:
        show.table(
            ["RANK", "STATE", "PHASE", "STEP", "STEP S", "PID", "NODE", "GEN", "EXIT", "SIGNAL"],
            [
                [r["rank"], r["state"], r["phase"], r["step"], r["step_seconds"], r["pid"], r["node_id"][:8], r["generation"],
                 r["exit_code"], r["signal"]]
                for r in items
            ],
        )  # fmt: skip
