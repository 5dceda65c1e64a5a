"""up, down, db upgrade, doctor, demo."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import asdict
from typing import Annotated

import psutil
import typer

from api import server_record
from api.commands import show
from api.commands.options import AsJson, StateDir
from api.doctor import examine
from orchestrator import bootstrap, settings

STOP_S = 15.0
db = typer.Typer(help="The database.", no_args_is_help=True)


def up(
    nodes: Annotated[int | None, typer.Option(min=1, max=64, help="Local Ray nodes to make, 1 to 64.  [default: 1]")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=0, max=64, help="GPUs of each local node, 0 to 64.")] = 0,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one.  [default: 8765]")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Run everything on this machine: database, Ray cluster, control loop, API.

    Ctrl-C stops the server only. Jobs go on; `keepstep up` finds them again, `keepstep down` ends all.
    """
    from api.serve import Stop, serve

    chosen = settings.load(state_dir, port=port, host=host)

    def ready(address: str) -> None:
        if as_json:
            show.as_json({"address": address, "state_dir": str(chosen.state_dir), "pid": os.getpid()})
        else:
            print(f"KeepStep listens at {address}\nState folder: {chosen.state_dir}\nCtrl-C stops the server, jobs go on.")
        sys.stdout.flush()

    show.remark("starting ...")
    try:
        serve(chosen, nodes, gpus_per_node, ready)
    except Stop:
        show.remark("\nstopped before the server was up")
        raise typer.Exit(show.INTERRUPTED) from None
    show.remark("\nserver stopped. Jobs need no server to go on: `keepstep up` finds them again, `keepstep down` ends them all.")
    # All is closed by now. What Ray does at the exit of the interpreter would wait for ever for a cluster that is gone.
    logging.shutdown()
    os._exit(0)


def down(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """End the server of the state folder and its Ray cluster, with all jobs that run in it."""
    chosen = settings.load(state_dir)
    ended_server = _end_server(chosen)
    ended_cluster, jobs = bootstrap.end_cluster(chosen)
    if as_json:
        show.as_json({"server": ended_server, "cluster": ended_cluster, "jobs": [job.id for job in jobs]})
    elif ended_server or ended_cluster:
        print(f"ended: {' and '.join(['server'] * ended_server + ['cluster'] * ended_cluster)}")
        for job in jobs:
            show.remark(f"{job.id} ({job.name}) still ran; the next `keepstep up` starts it again from its newest checkpoint")
    else:
        print(f"nothing runs on the state folder {chosen.state_dir}")


def _end_server(chosen: settings.Settings) -> bool:
    record = server_record.read(chosen.state_dir)
    process = server_record.process_of(record) if record else None
    if process is None or not server_record.is_held(chosen.state_dir):
        if server_record.is_held(chosen.state_dir):
            raise settings.SettingsError(f"a server is just starting or ending on {chosen.state_dir}; try again")
        return False
    process.terminate()
    deadline = time.monotonic() + STOP_S
    while server_record.is_held(chosen.state_dir):
        if time.monotonic() > deadline:
            process.kill()
        try:
            process.wait(0.1)
        except psutil.TimeoutExpired:
            continue
    return True


@db.command("upgrade")
def db_upgrade(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Bring the database to the schema of this version."""
    chosen = settings.load(state_dir)
    settings.prepare_state_dir(chosen.state_dir)
    revision = bootstrap.upgrade_database(chosen)
    if as_json:
        show.as_json({"upgraded_to": revision})
    else:
        print("the database was up to date" if revision is None else f"upgraded to {revision}")


@db.command("release")
def db_release(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Let a server of another cluster lead, where the last one died for good. One that lives loses the lead, too."""
    holder = bootstrap.release_lease(settings.load(state_dir))
    if as_json:
        show.as_json({"released": holder})
    else:
        print("no server held the lease" if holder is None else f"released the lease of {holder}")


def doctor(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Check what a server on this machine needs: versions, database, cluster, storage, memory, port, clocks. Exit code 1: a problem."""
    findings = examine(settings.load(state_dir))
    if as_json:
        show.items_as_json(asdict(finding) for finding in findings)
    else:
        show.table(("CHECK", "", "FOUND"), ((f.name, "ok" if f.ok else "PROBLEM", f.detail) for f in findings))
        for finding in findings:
            if finding.remedy is not None:
                show.remark(f"{finding.name}: {finding.remedy}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def demo() -> None:
    """See it work: a real training job, a real kill -9, and the recovery. Leaves nothing behind."""
    from api.demo import run

    raise typer.Exit(run())
