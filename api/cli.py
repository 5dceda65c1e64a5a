"""The command `keepstep`.

Invariant: whatever goes wrong, the user reads one line for each problem and gets exit code 2; a traceback is a bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from api.client import ApiError
from api.commands import checkpoints, cluster, jobs, server, show, watch
from api.jobfile import JobFileError
from api.packing import PackingError
from api.server_record import ServerDown
from orchestrator.ports import Unavailable
from orchestrator.settings import SettingsError

HELP = """Runs training jobs on a cluster and keeps them in step when processes, GPUs and nodes fail.

The server is found through --state-dir or KEEPSTEP_STATE_DIR; KEEPSTEP_SERVER and KEEPSTEP_TOKEN override it. Exit code 2: not accepted or
no answer."""

app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
COMMANDS: list[Callable[..., None]] = [
    server.up, server.down, jobs.submit, jobs.plan, jobs.ls, jobs.get, watch.logs, watch.events, watch.incidents, checkpoints.checkpoints,
    watch.attempts, watch.ranks, jobs.cancel, jobs.delete, jobs.wait, jobs.drill, cluster.nodes, server.doctor, server.demo,
]  # fmt: skip
for command in COMMANDS:
    app.command()(command)
app.add_typer(server.db, name="db")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"keepstep {version('keepstep')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except (ApiError, JobFileError) as error:
        lines = error.lines() if isinstance(error, ApiError) else error.lines
        _fail(*lines)
    except (ServerDown, SettingsError, PackingError, Unavailable) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _fail(*lines: str) -> None:
    for line in lines:
        show.remark(f"error: {line}")
    sys.exit(show.BAD_INPUT)


if __name__ == "__main__":
    main()
