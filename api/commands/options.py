"""Options and arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON as the API answers it.")]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="State folder of the server; default: KEEPSTEP_STATE_DIR, else the user's.")
]
JobRef = Annotated[str, typer.Argument(metavar="JOB", help="Job id or name; write `-- -name` for a name that begins with a dash.")]
SpecFile = Annotated[Path, typer.Option("-f", "--file", help="Job spec in YAML or JSON; `-` reads standard input.")]
Rank = Annotated[int | None, typer.Option(help="Only this rank.")]
