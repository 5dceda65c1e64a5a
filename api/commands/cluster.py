"""nodes."""

from __future__ import annotations

from api.client import Client
from api.commands import show
from api.commands.options import AsJson, StateDir


def nodes(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """List the nodes of the cluster."""
    items = list(Client.find(state_dir).every("/nodes", limit=200))
    if as_json:
        show.items_as_json(items)
    else:
        show.table(
            ["ID", "NAME", "STATE", "CPUS FREE", "GPUS FREE", "MEMORY GiB FREE", "CONDITIONS"],
            [
                [n["id"][:12], f"{n['name']} (head)" if n["head"] else n["name"], n["state"], _of(n["free_cpus"], n["cpus"]),
                 _of(n["free_gpus"], n["gpus"]), _of(n["free_memory_gb"], n["memory_gb"]), n["conditions"]]
                for n in items
            ],
        )  # fmt: skip


def _of(free: float, total: float) -> str:
    return f"{free:g} of {total:g}"
