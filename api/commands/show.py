"""What the CLI prints: tables for people, JSON for programs.

Invariant: text of users is printed exactly, never taken as markup; results go to stdout, remarks to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "CANCELLED": 3}
BAD_INPUT = 2
TIMED_OUT = 4
INTERRUPTED = 130
COLOURS = {"RUNNING": "green", "SUCCEEDED": "green", "FAILED": "red", "RECOVERING": "yellow", "CANCELLING": "yellow"}


def as_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def items_as_json(items: Iterable[Any]) -> None:
    as_json({"items": list(items), "next_cursor": None})


def remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows; None is shown as a dash."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell(value), style=COLOURS.get(str(value), "")) for value in row))
    _console().print(grid)


def facts(pairs: Iterable[tuple[str, Any]]) -> None:
    """Print one thing: a fact a line."""
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, Text(cell(value), style=COLOURS.get(str(value), "")))
    _console().print(grid)


def cell(value: Any) -> str:
    """A value as people read it."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{name}={cell(item)}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(cell, value)) or "-"
    return str(value)


def when(at: str | None) -> str | None:
    """A time of the API in the zone of the terminal."""
    return None if at is None else datetime.fromisoformat(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size(count: int) -> str:
    """Bytes as people read them."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def _console() -> Console:
    return Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=240, color_system=None)
