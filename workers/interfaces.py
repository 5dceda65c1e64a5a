"""The network interface over which the ranks of a node speak to those of other nodes."""

from __future__ import annotations

import psutil

LOOPBACK = "lo"


def interface_of(address: str) -> str | None:
    """The one that carries the node's address, as Ray knows it; None: none does, so that the libraries choose by the host's name."""
    if address.startswith("127."):
        return LOOPBACK
    carried = psutil.net_if_addrs()
    return next((name for name, found in carried.items() if any(a.address.split("%")[0] == address for a in found)), None)
