"""checkpoints: list, verify, pin, unpin, download."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from api.client import Client, ref_path
from api.commands import show
from api.commands.options import AsJson, StateDir

VERBS = ("verify", "pin", "unpin", "download")


def checkpoints(
    words: Annotated[list[str], typer.Argument(metavar="[verify|pin|unpin|download] JOB [STEP]", help="JOB alone lists them.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File or folder of a download, `-`: stdout; default JOB-step-STEP.tar.")
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the checkpoints of a job, newest first; verify, pin, unpin or download one.

    Exit code of verify: 0 every byte holds, 1 it is damaged.
    """
    client = Client.find(state_dir)
    if len(words) == 1:
        _list(client, words[0], as_json)
        return
    verb, job, step = _parsed(words)
    if verb == "download":
        _download(client, job, step, output)
        return
    found = client.post(ref_path(job, "checkpoints", step, verb), timeout=None)
    if as_json:
        show.as_json(found)
    else:
        print(f"step {found['step']}: {_known(found)}{', pinned' if found['pinned'] else ''}")
    if verb == "verify" and found["problem"]:
        raise typer.Exit(1)


def _parsed(words: list[str]) -> tuple[str, str, str]:
    if len(words) != 3 or words[0] not in VERBS:
        raise typer.BadParameter(f"give a job to list its checkpoints, or one of {', '.join(VERBS)} with JOB and STEP")
    if not words[2].isdecimal():
        raise typer.BadParameter(f"STEP must be a whole number, not {words[2]!r}; `keepstep checkpoints {words[1]}` lists them")
    return words[0], words[1], words[2]


def _list(client: Client, job: str, as_json: bool) -> None:
    items = list(client.every(ref_path(job, "checkpoints"), limit=200))
    if as_json:
        show.items_as_json(items)
        return
    show.table(
        ["STEP", "ATTEMPT", "GEN", "SIZE", "COMMITTED", "STATE", "PINNED", "URL"],
        [
            [c["step"], c["attempt"], c["generation"], show.size(c["bytes"]), show.when(c["committed_at"]), _known(c),
             "pinned" if c["pinned"] else None, c["url"]]
            for c in items
        ],
    )  # fmt: skip


def _known(checkpoint: dict[str, Any]) -> str:
    if checkpoint["problem"]:
        return f"damaged: {checkpoint['problem']}"
    read = "not read back yet" if checkpoint["verified_at"] is None else f"verified {show.when(checkpoint['verified_at'])}"
    return read if checkpoint["finite"] else f"{read}, metrics not finite"


def _download(client: Client, job: str, step: str, output: Path | None) -> None:
    path = ref_path(job, "checkpoints", step, "download")
    if output == Path("-"):
        client.download(path, sys.stdout.buffer)
        return
    name = f"{job.replace('/', '_')}-step-{step}.tar"
    target = output / name if output is not None and output.is_dir() else output or Path(name)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("wb") as file:
            client.download(path, file)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    show.remark(f"{target}: {show.size(target.stat().st_size)}")
