"""The program that starts the processes of the embedded Ray and ends: one head and the nodes that join it, all on the loopback interface.

``ray start`` cannot do this: it replaces 127.0.0.1 by the address of a network card, which opens its ports to the network and breaks the
cluster when a laptop changes its Wi-Fi. Reads one JSON object from stdin, writes one to stdout. Invariant: what it starts outlives it.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"


def main() -> None:
    """``{"temp_dir", "nodes", "cpus", "gpus", "memory", "object_store"}`` in (the last two in bytes, per node), ``{"address"}`` out."""
    wanted = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)  # Ray prints to stdout
    # The head offers no CPUs: coordinators live there, ranks do not.
    head = _start(wanted, node_name="head", temp_dir=wanted["temp_dir"], num_cpus=0, num_gpus=0, gcs_server_port=0)
    sockets = Path(head.get_session_dir_path()) / "sockets"

    def join(index: int) -> None:
        _start(
            wanted,
            node_name=f"local-{index + 1}",
            num_cpus=wanted["cpus"],
            num_gpus=wanted["gpus"],
            gcs_address=head.gcs_address,
            # Ray would look for names that are free, and nodes that start together find the same ones.
            raylet_socket_name=str(sockets / f"raylet-{index + 1}"),
            plasma_store_socket_name=str(sockets / f"store-{index + 1}"),
        )

    with ThreadPoolExecutor() as pool:
        list(pool.map(join, range(wanted["nodes"])))
    os.write(answer, json.dumps({"address": head.gcs_address}).encode())


def _start(wanted: dict[str, Any], **parameters: Any) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    all_parameters = RayParams(
        node_ip_address=LOOPBACK,
        memory=wanted["memory"],
        object_store_memory=wanted["object_store"],
        min_worker_port=0,  # any free port: several raylets would take the same ones from Ray's own range
        max_worker_port=0,
        dashboard_agent_listen_port=0,
        include_dashboard=False,
        include_log_monitor=False,  # nobody listens: ranks write their logs themselves
        no_monitor=True,  # no autoscaler
        **parameters,
    )
    return Node(all_parameters, head="gcs_address" not in parameters, shutdown_at_exit=False, spawn_reaper=False)


if __name__ == "__main__":
    main()
