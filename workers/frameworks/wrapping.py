"""Modules as they are wrapped by torch.compile and DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def uncompiled(module: Any) -> Any:
    """The module inside of torch.compile."""
    return getattr(module, "_orig_mod", module)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside of DDP and torch.compile, whose names do not depend on either."""
    inner = uncompiled(module)
    found: torch.nn.Module = uncompiled(inner.module) if isinstance(inner, DistributedDataParallel) else inner
    return found


def ddp_modules(parts: dict[str, Any]) -> dict[str, DistributedDataParallel]:
    """Of the parts that are, or hold, a DDP module, that module."""
    found = {name: uncompiled(part) for name, part in parts.items()}
    return {name: part for name, part in found.items() if isinstance(part, DistributedDataParallel)}
