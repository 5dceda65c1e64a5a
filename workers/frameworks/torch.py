"""PyTorch: joins the process group, and says which state the ranks share.

Equal on all ranks are the parameters of a DistributedDataParallel module, but for those that it was told to ignore, and the state of an
optimizer of nothing but such parameters. All else is the rank's own: buffers (batch norm statistics differ between the ranks until the next
forward pass), modules outside of DDP, schedulers, data, random generators. Alone, a group of one is made, so that
``DistributedDataParallel(model)`` works everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from workers.agreement import Store
from workers.checkpoint.snapshot import Place
from workers.checkpoint.tree import StateError
from workers.frameworks.buckets import BucketOrder, bucket_orders
from workers.frameworks.plain import (
    derive_generators,
    derive_random,
    load_into,
    random_state,
    refuse,
    seed_from,
    set_random_state,
    state_of,
)
from workers.frameworks.sharded import (
    fit_module,
    fit_optimizer,
    holds_shards,
    is_zero,
    load_zero,
    node_of,
    optimizer_nodes,
    parameters,
    refuse_unsharded,
    zero_state,
)
from workers.frameworks.windows import Windows, adrift, reopen
from workers.frameworks.wrapping import uncompiled, unwrap


class Torch:
    """The adapter of PyTorch. ``device`` is the rank's GPU, else the CPU; ``strategy`` is None."""

    strategy: Any = None

    def __init__(self, place: Place, launched: bool) -> None:
        self._alone = place.world_size == 1
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.store: Store | None = None
        self._joined = False
        # Found at the first capture; a parameter that is added later counts as the rank's own, which is always right.
        self._equal: dict[str, frozenset[str]] | None = None
        self._replicated: set[int] = set()
        self._sharded: set[str] = set()
        self._lead: list[str] = []
        self._windows = Windows()
        self._orders: dict[str, BucketOrder] = {}
        self._loaders: list[DataLoader[Any]] = []
        self._fetched: list[int] = []  # batches that each had given when the last step was finished
        if not dist.is_initialized():
            self.store = self._join(place, launched)

    def _join(self, place: Place, launched: bool) -> Store:
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        if launched and "MASTER_ADDR" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://"))
        else:
            store, rank, world_size = dist.HashStore(), 0, 1
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        self._joined = True
        found: Store = store
        return found

    def begin(self, parts: dict[str, Any]) -> None:
        for name, part in parts.items():
            refuse(name, part)
            refuse_unsharded(name, part)
        self._windows.begin(parts)
        self._orders = bucket_orders(parts)
        self._loaders = [part for part in parts.values() if isinstance(part, DataLoader)]

    def capture(self, parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state equal on all ranks, state of this rank). Tensors are the live ones, not copies."""
        if self._equal is None:
            self._equal = {name: self._equal_names(part) for name, part in parts.items() if isinstance(part, torch.nn.Module)}
            named = [(names, unwrap(parts[part])) for part, names in self._equal.items()]
            self._replicated = {
                id(p) for names, module in named for name, p in module.named_parameters(remove_duplicate=False) if name in names
            }
            self._sharded = {name for name, part in parts.items() if holds_shards(part)}
            self._lead = [] if self._alone else [name for name, part in parts.items() if _copies_buffers(part)]
        shared, own = {}, {}
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                state = module_state(unwrap(part))
                if name in self._sharded:
                    state = {key: node_of(value) for key, value in state.items()}
                equal = self._equal.get(name, frozenset())
                shared[name] = {key: value for key, value in state.items() if key in equal}
                own[name] = {key: value for key, value in state.items() if key not in equal}
            elif is_zero(part):
                own[name] = zero_state(part)
            elif isinstance(part, torch.optim.Optimizer):
                state = optimizer_nodes(part.state_dict()) if name in self._sharded else part.state_dict()
                equal_params = self._alone or {id(p) for p in parameters(part)} <= self._replicated
                (shared if equal_params else own)[name] = state
            else:
                own[name] = state_of(part)
        rest: dict[str, Any] = {"parts": own, "random": self._random_state()}
        if window := self._windows.state(parts):
            rest["window"] = window
        if orders := {name: order.known for name, order in self._orders.items() if order.known is not None}:
            rest["buckets"] = orders
        if self._lead:
            rest["lead"] = self._lead
        return shared, rest

    def apply(self, parts: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Put the state in place; returns the parts, a plain tree replaced by what was saved. Raises StateError naming the part."""
        loaded = {}
        for name, part in parts.items():
            try:
                if isinstance(part, torch.nn.Module):
                    inner = unwrap(part)
                    state = shared.get(name, {}) | own["parts"].get(name, {})
                    inner.load_state_dict(fit_module(state, inner.state_dict()))
                    loaded[name] = part
                else:
                    loaded[name] = load(part, shared[name] if name in shared else own["parts"][name])
            except (StateError, RuntimeError, ValueError, KeyError) as error:
                raise StateError(f"the saved state does not fit into {name}: {error}") from error
        for name, order in own.get("buckets", {}).items():
            if name in self._orders:
                self._orders[name].replay(order)
        if "window" in own:
            reopen(parts, own["window"])
        self._set_random_state(own["random"])
        return loaded

    def step_finished(self) -> None:
        self._windows.step_finished()
        for order in self._orders.values():
            order.step_finished()
        self._fetched = [_fetched(loader) for loader in self._loaders]

    def moved(self) -> bool:
        return self._windows.moved or (bool(self._fetched) and self._fetched != [_fetched(loader) for loader in self._loaders])

    def derive(self, names: Collection[str], parts: dict[str, Any], rank: int) -> None:
        derive_random(names, rank)
        if "torch" in names:
            torch.default_generator.manual_seed(seed_from(int(torch.randint(2**62, (1,))), rank))
        if "cuda" in names and self.device.type == "cuda":
            torch.cuda.manual_seed(seed_from(int(torch.randint(2**62, (1,), device=self.device)), rank))
        derive_generators(names, parts, rank)

    def adrift(self, parts: dict[str, Any]) -> bool:
        """The ranks may be several steps apart now."""
        return not self._alone and adrift(parts)

    def close(self) -> None:
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()

    def _equal_names(self, module: torch.nn.Module) -> frozenset[str]:
        named = unwrap(module).named_parameters(remove_duplicate=False)
        if self._alone:
            return frozenset(name for name, _ in named)
        ddp = uncompiled(module)
        if not isinstance(ddp, DistributedDataParallel):
            return frozenset()
        ignored = {id(p) for name, p in ddp.module.named_parameters(remove_duplicate=False) if name in ddp.parameters_to_ignore}
        return frozenset(name for name, param in named if not isinstance(param, DTensor) and id(param) not in ignored)

    def _random_state(self) -> dict[str, Any]:
        state = random_state() | {"torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _set_random_state(self, state: dict[str, Any]) -> None:
        set_random_state(state)
        torch.set_rng_state(state["torch"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def _fetched(loader: DataLoader[Any]) -> int:
    """Batches that the present iteration of a loader with a position has given."""
    return getattr(getattr(loader, "_iterator", None), "_num_yielded", 0)


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """What ``module.state_dict()`` holds, the live tensors, at a third of its cost."""
    state: dict[str, Any] = {}
    return state if _collect(module, "", state) else module.state_dict()


def _collect(module: torch.nn.Module, prefix: str, state: dict[str, Any]) -> bool:
    """As torch.nn.Module.state_dict does; False where the module has its own way to make its state."""
    kind, fields = type(module), module.__dict__
    if (
        kind.state_dict is not _STATE_DICT
        or kind._save_to_state_dict is not _SAVE_TO_STATE_DICT
        or kind.get_extra_state is not _GET_EXTRA_STATE
        or "state_dict" in fields
        or "_save_to_state_dict" in fields
        or fields["_state_dict_hooks"]
        or fields["_state_dict_pre_hooks"]
    ):
        return False
    for name, parameter in fields["_parameters"].items():
        if parameter is not None:
            state[prefix + name] = parameter
    passing = fields["_non_persistent_buffers_set"]
    for name, buffer in fields["_buffers"].items():
        if buffer is not None and name not in passing:
            state[prefix + name] = buffer
    return all(child is None or _collect(child, f"{prefix}{name}.", state) for name, child in fields["_modules"].items())


_STATE_DICT = torch.nn.Module.state_dict
_SAVE_TO_STATE_DICT = torch.nn.Module._save_to_state_dict
_GET_EXTRA_STATE = torch.nn.Module.get_extra_state


def _copies_buffers(part: Any) -> bool:
    """All ranks take rank 0's buffers before each forward pass, and nothing else in the module is a rank's own."""
    ddp = uncompiled(part)
    return isinstance(ddp, DistributedDataParallel) and ddp.broadcast_buffers and not ddp.parameters_to_ignore


def load(part: Any, state: Any) -> Any:
    """As plain.load_into, in every bit, and shards cut anew where they must."""
    if is_zero(part):
        _keep_types(part.optim, load_zero(part, state))
        return part
    if isinstance(part, torch.optim.Optimizer):
        state = fit_optimizer(part, state)
        part.load_state_dict(state)
        _keep_types(part, state)
        return part
    loaded = load_into(part, state)
    if isinstance(part, DataLoader):
        part.state_dict()  # makes its iterator now: later it would draw from the generators that are restored last
    return loaded


def _keep_types(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """torch casts floating state to the type of its parameter, which loses bits where an optimizer keeps wider state."""
    places = [place for group in saved["param_groups"] for place in group["params"]]
    for place, param in zip(places, parameters(optimizer), strict=True):
        for key, value in saved["state"].get(place, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[param][key] = value.to(now.device)
