"""Follows the log or the history of a job through restarts of the server, until the job ends or the user detaches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from api.client import Client, LogEvent, ref_path
from api.commands import show
from api.server_record import ServerDown

RETRY_S = 1.0


def follow(
    state_dir: Path | None,
    job: dict[str, Any],
    rank: int | None = None,
    generation: int | None = None,
    tail: int | None = None,
    as_json: bool = False,
) -> str:
    """Print the log as it grows; returns the job's state at the end. Ctrl-C exits with 130 and leaves the job alone."""
    prefixed = rank is None and job["world_size"] > 1
    wanted = {"rank": rank, "generation": generation, "tail": tail}
    return _through_restarts(state_dir, job, "logs", wanted, lambda event: _print(event, prefixed, as_json))


def follow_events(state_dir: Path | None, job: dict[str, Any], as_json: bool = False) -> str:
    """Print each event as it is recorded; else as ``follow``."""
    return _through_restarts(state_dir, job, "events", {}, lambda event: _print_event(event, as_json))


def _through_restarts(
    state_dir: Path | None, job: dict[str, Any], what: str, wanted: dict[str, Any], print_one: Callable[[LogEvent], None]
) -> str:
    since: str | None = None
    connected = told = False
    path = ref_path(job["id"], what)
    try:
        while True:
            try:
                for event in Client.find(state_dir).follow(path, since, **wanted):
                    connected, told = True, False
                    since = event.id or since
                    print_one(event)
                    if event.kind == "end":
                        return str(event.data["state"])
            except ServerDown:
                if not connected:
                    raise
                if not told:
                    show.remark("the server does not answer, trying again (Ctrl-C detaches and leaves the job alone)")
                told = True
            time.sleep(RETRY_S)
    except KeyboardInterrupt:
        show.remark(f"\ndetached, the job is left alone. Follow it again: keepstep {what} -f {job['id']}")
        raise typer.Exit(show.INTERRUPTED) from None


def _print(event: LogEvent, prefixed: bool, as_json: bool) -> None:
    if as_json:
        show.as_json({"event": event.kind, **event.data})
        sys.stdout.flush()
    elif event.kind == "log":
        text = event.data["text"]
        sys.stdout.write(f"[rank {event.data['rank']}] {text.removesuffix(chr(10))}\n" if prefixed else text)
        sys.stdout.flush()
    elif event.kind == "job":
        show.remark(f"--- {event.data['id']} {event.data['state']}: {event.data['message'] or event.data['reason']}")


def _print_event(event: LogEvent, as_json: bool) -> None:
    data = event.data
    if as_json:
        show.as_json({"event": event.kind, **data})
    elif event.kind == "event":
        print(f"{show.when(data['at'])}  {data['reason']}: {data['message']}")
    sys.stdout.flush()
