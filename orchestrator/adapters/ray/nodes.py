"""The Nodes port: what Ray says about its nodes. Invariant: a node that is lost stays in view, as UNREACHABLE, for ``LATELY_S`` seconds."""

from __future__ import annotations

from typing import Any

from orchestrator.adapters.ray.session import answer
from orchestrator.core.model import Node, NodeState
from orchestrator.ports import Clock

LATELY_S = 600.0
_GIB = 1024**3


class RayNodes:
    """Needs a session (``connect``)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lost_at: dict[str, float] = {}

    def nodes(self) -> tuple[Node, ...]:
        """Alive and lately lost nodes, the head first, then by name. Raises Unavailable."""
        seen, free = answer(_read)
        now = self._clock.now()
        names = {node["NodeName"] for node in seen if node["Alive"]}
        nodes = []
        for raw in seen:
            if raw["Alive"]:
                self._lost_at.pop(raw["NodeID"], None)
            elif now - self._lost_at.setdefault(raw["NodeID"], now) > LATELY_S or raw["NodeName"] in names:
                continue  # forgotten, or back under its name
            nodes.append(_node(raw, free.get(raw["NodeID"], {})))
        return tuple(sorted(nodes, key=lambda node: (not node.head, node.name, node.id)))


def _read() -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    import ray
    from ray._private.state import available_resources_per_node

    return ray.nodes(), available_resources_per_node()


def _node(raw: dict[str, Any], free: dict[str, float]) -> Node:
    total = raw["Resources"]
    return Node(
        id=raw["NodeID"],
        name=raw["NodeName"],
        address=raw["NodeManagerAddress"],
        state=NodeState.READY if raw["Alive"] else NodeState.UNREACHABLE,
        cpus=total.get("CPU", 0.0),
        gpus=int(total.get("GPU", 0)),
        memory_gb=total.get("memory", 0.0) / _GIB,
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        free_memory_gb=free.get("memory", 0.0) / _GIB,
        head="node:__internal_head__" in total,
        conditions=() if raw["Alive"] else (raw["DeathReasonMessage"] or "does not answer",),
        labels={name: value for name, value in raw["Labels"].items() if name != "ray.io/node-id"},
    )
