"""Making the agents of a group: one Ray actor on each of its nodes, found by name where it exists already."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.agent import Agent
from workers.messages import GroupSpec
from workers.neighbours import agent_name


class NodeGone(Exception):
    """Ray says that the node is not alive."""


def address_of(spec: GroupSpec, index: int) -> str:
    """Where a node of the group is reached. Raises NodeGone."""
    node = next((n for n in ray.nodes() if n["NodeID"] == spec.nodes[index].node_id), None)
    if node is None or not node["Alive"]:
        raise NodeGone(f"node {spec.nodes[index].node_id} has left the cluster")
    return str(node["NodeManagerAddress"])


def make_agent(spec: GroupSpec, index: int) -> Any:
    """The agent of one node, found or made; whoever comes first makes it. Raises NodeGone."""
    address = address_of(spec, index)
    options: dict[str, Any] = {
        "name": agent_name(spec.key, index),
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": spec.cpus_per_node,
        "num_gpus": spec.gpus_per_node,
        "max_restarts": 0,  # Ray reports the death of an actor that it does not restart in 20 ms; we make the next one
        "max_concurrency": 1000,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(ray.util.get_placement_group(spec.key), placement_group_bundle_index=index),
    }
    return ray.remote(Agent).options(**options).remote(spec, index, address, adopts=True)
