"""The order in which DDP puts gradients into buckets, kept over a restart.

DDP makes its buckets anew before the second pass, in the order in which gradients became ready in the first. Where an element lies in its
bucket decides in which order the ranks' values are added, and with three ranks or more that decides the last bits. So the order is noted
in the first pass and gone through once more, with zeros, after a restore. Two ranks need none of this: a + b is b + a.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from workers.frameworks.wrapping import ddp_modules


class BucketOrder:
    """One DDP module's order, by the places of its trainable parameters; ``known`` is None until a first pass has told it."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.known: torch.Tensor | None = None
        self._ready: dict[int, None] = {}
        self._handles = [param.register_post_accumulate_grad_hook(self._noting(i)) for i, param in enumerate(_trainable(ddp))]

    def _noting(self, place: int) -> Any:
        def note(param: torch.Tensor) -> None:
            if self._ddp.require_forward_param_sync:  # not under no_sync, where DDP takes no note either
                self._ready[place] = None

        return note

    def step_finished(self) -> None:
        if self.known is None and self._ready:
            self.settle(torch.tensor(list(self._ready), dtype=torch.int32))

    def settle(self, order: torch.Tensor) -> None:
        """The order is this one."""
        self.known = order
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def replay(self, order: torch.Tensor) -> None:
        """One pass of zeros over all ranks, after which DDP makes the buckets that it had."""
        ddp, params = self._ddp, _trainable(self._ddp)
        self.settle(order)
        with torch.enable_grad():
            total = torch.zeros((), device=params[0].device)
            for place in reversed(order.tolist()):  # what is added last is ready first
                total = total + params[place].sum().to(total)
            ddp.reducer.prepare_for_forward()
            ddp.reducer.prepare_for_backward([])
            total.backward(torch.zeros_like(total))
        for param in params:
            param.grad = None


def bucket_orders(parts: dict[str, Any]) -> dict[str, BucketOrder]:
    """Of the parts where the order can change and matters."""
    return {name: BucketOrder(ddp) for name, ddp in ddp_modules(parts).items() if _matters(ddp)}


def _matters(ddp: DistributedDataParallel) -> bool:
    # With find_unused_parameters buckets stay as they were made; a static graph makes them in an order of its own.
    return ddp.process_group.size() > 2 and not ddp.find_unused_parameters and not ddp.static_graph


def _trainable(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    return [param for param in ddp.module.parameters() if param.requires_grad]
