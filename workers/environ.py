"""PURE: the environment of launchers and ranks: torchrun's variables, TensorFlow's, and our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workers.messages import GroupSpec, LaunchOrder, Source
from workers.processes import CLUSTER_MARK, MARK

# Ray's own variables would make a script's ray.init() join our cluster; the others are Ray's defaults for its workers, not the user's wish.
_NOT_PASSED = ("RAY_", "PYTHONBREAKPOINT", "OMP_NUM_THREADS", "KEEPSTEP_")


def launcher_environment(base: Mapping[str, str], spec: GroupSpec, index: int, interface: str | None, tmp: str) -> dict[str, str]:
    """What the launcher is started with, and so what every process of the node carries from birth. ``interface``: of the node's address."""
    env = {k: v for k, v in base.items() if not k.startswith(_NOT_PASSED)}
    if CLUSTER_MARK in base:
        env[CLUSTER_MARK] = base[CLUSTER_MARK]
    env["OMP_NUM_THREADS"] = str(max(1, int(spec.cpus_per_node) // spec.processes_per_node))
    env["PYTHONUNBUFFERED"] = "1"
    env["TF_CPP_MIN_LOG_LEVEL"] = "2"
    env["TMPDIR"] = tmp  # killed processes leave there what they would have removed
    if interface is not None:  # else gloo takes the address of the host's name, which other hosts may not reach
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly, not all whose names begin so
    env.update(spec.env)
    env[MARK] = f"{spec.key}.{index}"
    env["KEEPSTEP_JOB_ID"] = spec.job_id
    env["KEEPSTEP_ATTEMPT"] = str(spec.attempt)
    return env


def rank_environment(
    spec: GroupSpec, index: int, local_rank: int, order: LaunchOrder, shm: str, saved: str, staged: str | None
) -> dict[str, str]:
    """What one rank of one generation gets on top of the launcher's."""
    per_node = spec.processes_per_node
    rank = index * per_node + local_rank
    restore: dict[str, Any] | None = None
    if order.restore.source != Source.NONE:
        restore = {"step": order.restore.step, "source": str(order.restore.source), "staged": staged}
    place = {"RANK": rank, "WORLD_SIZE": spec.world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": per_node, "NODE_RANK": index}
    env = {f"KEEPSTEP_{name}": str(value) for name, value in place.items()}
    env |= {
        "KEEPSTEP_GENERATION": str(order.generation),
        "KEEPSTEP_FRAMEWORK": spec.framework,
        "KEEPSTEP_STRATEGY": spec.strategy or "",
        "KEEPSTEP_SHM": shm,
        "KEEPSTEP_CHECKPOINT_DIR": saved,
        "KEEPSTEP_EVERY_STEPS": str(spec.every_steps or ""),
        "KEEPSTEP_SNAPSHOT_EVERY": str(spec.snapshot_every_steps or "auto"),
        "KEEPSTEP_RESTORE": json.dumps(restore),
    }
    if spec.devices_per_node is not None:
        env["KEEPSTEP_DEVICES"] = str(spec.devices_per_node)
    if spec.framework == "pytorch" or spec.world_size > 1:
        env |= {name: str(value) for name, value in place.items()}
        env |= _torchrun(spec, index, rank, order)
    return env


def _torchrun(spec: GroupSpec, index: int, rank: int, order: LaunchOrder) -> dict[str, str]:
    env = {
        "GROUP_RANK": str(index),
        "GROUP_WORLD_SIZE": str(len(spec.nodes)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": order.master_address,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(order.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_infrastructure),
        "TORCHELASTIC_RUN_ID": spec.job_id,
    }
    if order.agent_store:  # without a store behind it this variable makes ranks wait for ever
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return env
