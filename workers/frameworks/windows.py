"""What an unfinished accumulation window holds beside the parts, when ``run.step`` is called in the middle of one.

A gradient is used once an optimizer that holds its parameter has stepped; one that was not used since the last ``run.step`` belongs to an
unfinished window and is state; one that a scaler left out, since it overflowed, is used too. So a script that steps its optimizer before
each ``run.step`` pays nothing. Under ``no_sync`` DDP also leaves out the next copy of rank 0's buffers, which is the other half. Invariant:
parameters are named by their place in an optimizer that is a part, as in its own state_dict.
"""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workers.checkpoint.tree import StateError
from workers.frameworks.sharded import fit, node_of, parameters
from workers.frameworks.wrapping import ddp_modules


class Windows:
    """Sees every optimizer's steps from the moment it is made."""

    def __init__(self) -> None:
        self._begun = False  # an optimizer began to step since the last run.step
        self._stepping: dict[int, Optimizer] = {}  # since the last run.step
        self._stepped: dict[int, Optimizer] = {}  # before it, since the one before
        self._left_out: set[int] = set()  # optimizers that a scaler was asked to step, by id
        self._scalers: list[Any] = []
        self._scaled: list[dict[int, Any]] = []  # what each scaler knew of its optimizers after the last run.step
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._note)

    def begin(self, parts: dict[str, Any]) -> None:
        self._scalers = [part for part in parts.values() if isinstance(part, GradScaler) and part.is_enabled()]
        self._scaled = [scaler._per_optimizer_states for scaler in self._scalers]

    @property
    def moved(self) -> bool:
        return self._begun

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begun = True

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping[id(optimizer)] = optimizer

    def step_finished(self) -> None:
        self._begun = False
        self._stepped, self._stepping = self._stepping, {}
        self._left_out = set()
        for i, scaler in enumerate(self._scalers):
            if scaler._per_optimizer_states is not self._scaled[i]:  # ``update`` begins a new one
                self._left_out |= {key for key, state in self._scaled[i].items() if state["stage"] is OptState.STEPPED}
                self._scaled[i] = scaler._per_optimizer_states

    def state(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Of the window that is open, empty where none is: ``gradients`` by part and place, ``unsynced`` DDP modules. Raises StateError."""
        for name, part in parts.items():
            if isinstance(part, FSDPModule) and not all(group.reduce_grads and group.all_reduce_grads for group in _groups(part)):
                raise StateError(
                    f"step: {name} has set_requires_gradient_sync(False), and its gradients of an open accumulation window cannot be had; "
                    "call run.step once per window, after set_requires_gradient_sync(True)"
                )
        unsynced = [name for name, ddp in ddp_modules(parts).items() if _unsynced(ddp)]
        gradients = {name: found for name, part in parts.items() if isinstance(part, Optimizer) and (found := self._unused(part))}
        return {"gradients": gradients, "unsynced": unsynced} if gradients or unsynced else {}

    def _unused(self, optimizer: Optimizer) -> dict[int, Any]:
        if id(optimizer) in self._stepped or id(optimizer) in self._left_out:
            return {}
        used = {id(p) for stepped in self._stepped.values() for p in parameters(stepped)}  # one that wraps another steps inside
        return {i: node_of(p.grad) for i, p in enumerate(parameters(optimizer)) if p.grad is not None and id(p) not in used}


def adrift(parts: dict[str, Any]) -> bool:
    """The last backward pass waited for no other rank, so the ranks may be steps apart."""
    return any(map(_unsynced, ddp_modules(parts).values()))


def reopen(parts: dict[str, Any], saved: dict[str, Any]) -> None:
    """Go on with the window of ``Windows.state``. Raises StateError where a parameter is missing or has another shape."""
    for name, ddp in ddp_modules(parts).items():
        ddp.require_forward_param_sync = name not in saved["unsynced"]
    for name, gradients in saved["gradients"].items():
        places = parameters(parts[name])
        for place, gradient in gradients.items():
            fitted = fit(f"gradient {place}", gradient, places[place]) if place < len(places) else None
            if fitted is None or fitted.shape != places[place].shape:
                raise StateError(f"the saved gradients do not fit into {name}: parameter {place} is missing or has another shape")
            places[place].grad = fitted.to(places[place].device)


def _groups(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_groups


def _unsynced(ddp: DistributedDataParallel) -> bool:
    return not ddp.require_forward_param_sync
