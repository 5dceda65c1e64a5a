"""Sharded state of torch: DTensors of fully_shard, and the optimizer of ZeroRedundancyOptimizer, to and from nodes of checkpoint.shards.

Each rank saves its piece with its place in the whole, without a collective. A restore fills whatever the module or optimizer has now, with
the same or another layout, or no sharding at all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workers.checkpoint.shards import SCATTERED, SHARDED, Box, boxes, is_sharded, recut, sharded, whole
from workers.checkpoint.tree import StateError


def refuse_unsharded(name: str, part: Any) -> None:
    """Raises StateError for wrappers whose state is to be had by collectives only."""
    if isinstance(part, torch.nn.Module) and any(type(module).__name__ == "FullyShardedDataParallel" for module in part.modules()):
        raise StateError(f"restore: {name} is a FullyShardedDataParallel, whose state takes a collective; use fully_shard(model)")
    if is_zero(part) and part._overlap_with_ddp:
        raise StateError(f"restore: {name} has overlap_with_ddp=True, which keeps its state elsewhere; leave it out")


def parameters(optimizer: Any) -> list[torch.Tensor]:
    """In the order of its state_dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def holds_shards(part: Any) -> bool:
    """It is a module or an optimizer of DTensors."""
    if isinstance(part, torch.nn.Module):
        return any(isinstance(value, DTensor) for value in part.parameters())
    return isinstance(part, torch.optim.Optimizer) and any(isinstance(value, DTensor) for value in parameters(part))


def node_of(value: Any) -> Any:
    """A DTensor's node; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    mesh, placements = value.device_mesh, tuple(value.placements)
    if any(placement.is_partial() for placement in placements):
        raise StateError(f"a DTensor with the placements {placements} holds partial sums and cannot be saved; redistribute it first")
    with torch.no_grad():
        local = value.to_local()
    offset = _box(tuple(value.shape), mesh, placements).offset if _is_box(placements) else None
    return sharded(value.shape, [str(placement) for placement in placements], offset, local)


def optimizer_nodes(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with nodes in the place of DTensors."""
    entries = {place: {key: node_of(value) for key, value in entry.items()} for place, entry in state["state"].items()}
    return state | {"state": entries}


def fit_module(state: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """What ``load_state_dict`` takes: ``state`` cut for the tensors that the module has now. Raises StateError naming the tensor."""
    return {key: fit(key, value, live[key]) if key in live else value for key, value in state.items()}


def fit_optimizer(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    places = [place for group in state["param_groups"] for place in group["params"]]
    params = dict(zip(places, parameters(optimizer), strict=False))
    entries = {
        place: {key: fit(f"{place}/{key}", value, params[place]) for key, value in entry.items()} if place in params else entry
        for place, entry in state["state"].items()
    }
    return state | {"state": entries}


def fit(path: str, value: Any, live: Any) -> Any:
    """``value``, a node or a tensor, in the layout of ``live``, a tensor or DTensor."""
    if not is_sharded(value):
        if not isinstance(live, DTensor) or not isinstance(value, torch.Tensor) or value.shape != live.shape or not value.dim():
            return value
        value = sharded(value.shape, [], (0,) * value.dim(), value)
    try:
        return _fitted(value, live)
    except StateError as error:
        raise StateError(f"{path}: {error}") from error


def _fitted(node: dict[str, Any], live: Any) -> Any:
    shape = torch.Size(node[SHARDED])
    if not isinstance(live, DTensor):
        return _filled(node, whole(shape))
    # State that is not shaped as its parameter, factors for instance, keeps the placements that it had.
    placements = tuple(live.placements) if shape == live.shape else _placements(node["placements"], live.device_mesh.ndim)
    boxed = _is_box(placements)
    local = _filled(node, _box(tuple(shape), live.device_mesh, placements)) if boxed else _only_piece(node, placements)
    stride = live.stride() if shape == live.shape else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.to(live.device), live.device_mesh, placements, run_check=False, shape=shape, stride=tuple(stride))


def _filled(node: dict[str, Any], wanted: Box) -> torch.Tensor:
    pieces = [piece for _, piece in node["pieces"]]
    out = torch.empty(wanted.shape, dtype=pieces[0].dtype)
    for copy in recut(wanted, boxes(node)):
        out[copy.target] = pieces[copy.piece][copy.source]
    return out


def _only_piece(node: dict[str, Any], placements: Sequence[Any]) -> torch.Tensor:
    if len(node["pieces"]) != 1 or node["placements"] != [str(placement) for placement in placements]:
        raise StateError(f"saved as {' x '.join(node['placements'])}, which cannot be cut for {' x '.join(map(str, placements))}")
    piece: torch.Tensor = node["pieces"][0][1]
    return piece


def _is_box(placements: Sequence[Any]) -> bool:
    return all(type(placement) in (Shard, Replicate) for placement in placements)


@lru_cache(maxsize=65536)
def _box(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> Box:
    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(local))


def _placements(names: Sequence[str], dimensions: int) -> tuple[Any, ...]:
    found = [re.fullmatch(r"S\((\d+)\)|R", name) for name in names]
    if len(found) != dimensions or None in found:
        raise StateError(f"saved as {' x '.join(names)}, which does not fit a mesh of {dimensions} dimensions")
    return tuple(Shard(int(match[1])) if match and match[1] else Replicate() for match in found)


def is_zero(part: Any) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(part, module.ZeroRedundancyOptimizer)


def zero_state(zero: Any) -> dict[str, Any]:
    """This rank's part: the state of its own parameters by their place among all, and the settings of the groups."""
    place = zero._param_to_index
    groups = [{key: value for key, value in group.items() if key != "params"} for group in zero.param_groups]
    return {"state": {SCATTERED: {place[param]: dict(entry) for param, entry in zero.optim.state.items()}}, "param_groups": groups}


def load_zero(zero: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Put the state of the parameters that are this rank's now in place; gives what its local optimizer was given."""
    if len(state["param_groups"]) != len(zero.param_groups):
        raise StateError(f"it has {len(zero.param_groups)} groups of parameters, the saved state {len(state['param_groups'])}")
    for group, saved in zip(zero.param_groups, state["param_groups"], strict=True):
        group.update(saved)
    zero._sync_param_groups(zero.param_groups, zero.optim.param_groups)
    place, held = zero._param_to_index, state["state"][SCATTERED]
    known = [(i, place[param]) for i, param in enumerate(parameters(zero.optim))]
    local: dict[str, Any] = zero.optim.state_dict() | {"state": {i: held[number] for i, number in known if number in held}}
    zero.optim.load_state_dict(local)
    return local
