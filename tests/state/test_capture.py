"""Reading a state again at little cost never misses what has changed in it, and what is copied is what was there."""

from __future__ import annotations

import copy
import json
import mmap
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import keys, same, trees

from workers.checkpoint.copying import CHUNK, Copier
from workers.checkpoint.layout import LARGE, lay_out, locate
from workers.checkpoint.outline import Outline
from workers.checkpoint.reader import read_snapshot
from workers.checkpoint.slots import holdings
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.checkpoint.tree import StateError, fill, flatten, materialize, scalars_json, spec_of, unflatten
from workers.frameworks.torch import Torch, module_state


def outline(tree: Any) -> Outline:
    skeleton, leaves = flatten(tree, "", [])
    return Outline(skeleton, [leaf for _, leaf in leaves])


def mutate(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with one place below it exchanged, dropped or added."""
    if isinstance(tree, dict) and tree and draw(st.booleans()):
        key = draw(st.sampled_from(list(tree)))
        changed = dict(tree)
        match draw(st.integers(0, 3)):
            case 0:
                del changed[key]
            case 1:
                changed[draw(keys)] = draw(trees)
            case 2:
                changed[key] = mutate(draw, tree[key])
            case _:
                changed[key] = changed.pop(key)  # another order
        return type(tree)(changed)
    if isinstance(tree, list | tuple) and tree and draw(st.booleans()):
        at = draw(st.integers(0, len(tree) - 1))
        return type(tree)([mutate(draw, item) if i == at else item for i, item in enumerate(tree)])
    return draw(trees)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_an_outline_reads_what_flatten_would_or_nothing(data: st.DataObject) -> None:
    first = data.draw(trees)
    second = data.draw(st.composite(mutate)(first)) if data.draw(st.booleans()) else copy.deepcopy(first)
    scalars: list[Any] = []
    skeleton, leaves = flatten(second, "", scalars)
    read = outline(first).read(second)
    if read is None:
        known = flatten(first, "", [])
        assert (skeleton, [form(leaf) for _, leaf in leaves]) != (known[0], [form(leaf) for _, leaf in known[1]])
        return
    assert [id(array) for array in read[0]] == [id(leaf) for _, leaf in leaves]
    assert same(unflatten(filled(flatten(first, "", [])[0], read[1]), read[0]), second)
    assert same(unflatten(filled(skeleton, scalars), read[0]), second)


def filled(skeleton: Any, scalars: list[Any]) -> Any:
    return fill(json.loads(json.dumps(skeleton)), json.loads(scalars_json(scalars)))


def form(array: Any) -> Any:
    return type(array), array.dtype, array.shape


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({1: 2}, {True: 2}),
        ({"a": [1, 2]}, {"a": [1, torch.ones(1)]}),
        ({"a": torch.ones(2)}, {"a": np.ones(2, np.float32)}),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).to_sparse()}),
        ({"a": np.float32(1)}, {"a": np.array(1, np.float32)}),
        ({"a": {}}, {"a": []}),
        ({"a": {}}, {"a": OrderedDict()}),
        ({"a": (1,)}, {"a": (1, 2)}),
        ({"a": 1}, {"a": {1}}),
    ],
)
def test_trees_that_look_alike_have_other_outlines(before: Any, after: Any) -> None:
    assert outline(before).read(after) is None
    assert outline(before).read(before) is not None


@given(trees)
def test_scalars_are_put_back(tree: Any) -> None:
    scalars: list[Any] = []
    skeleton, _ = flatten(tree, "", scalars)
    assert filled(skeleton, scalars) == json.loads(json.dumps(flatten(tree)[0]))


class Overrides(torch.nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key.upper(): value for key, value in super().state_dict(*args, **kwargs).items()}


class Saves(torch.nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "all"] = torch.cat([self.weight.detach().flatten(), self.bias.detach()])


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return torch.tensor([3])


def nested(inner: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.Sequential(inner, torch.nn.BatchNorm1d(2)), torch.nn.Linear(3, 2, bias=False)
    )
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    model.register_buffer("none", None)
    model.gone = None
    model.add_module("gap", None)
    return model


def hooked(after: bool) -> torch.nn.Module:
    inner = torch.nn.Linear(2, 2)
    if after:
        inner.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({prefix + "more": torch.ones(1)}))
    else:
        inner.register_state_dict_pre_hook(lambda module, prefix, keep: module.weight.data.fill_(7.0))
    return inner


def patched() -> torch.nn.Module:
    inner = torch.nn.Linear(2, 2)

    def mine(destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        destination = {} if destination is None else destination
        destination[prefix + "mine"] = torch.zeros(1)
        return destination

    inner.state_dict = mine  # type: ignore[method-assign, assignment]
    return inner


def patched_deeper() -> torch.nn.Module:
    inner = torch.nn.Linear(2, 2)
    inner._save_to_state_dict = lambda destination, prefix, keep_vars: destination.update({prefix + "w": inner.weight})  # type: ignore[method-assign]
    return inner


def tied() -> torch.nn.Module:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    inner[1].weight = inner[0].weight
    return inner


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 2),
        lambda: Overrides(2, 2),
        lambda: Saves(2, 2),
        lambda: Extra(2, 2),
        lambda: hooked(True),
        lambda: hooked(False),
        patched,
        patched_deeper,
        tied,
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
        lambda: torch.nn.LSTM(2, 2),
        lambda: torch.jit.script(torch.nn.Linear(2, 2)),
    ],
)
def test_module_state_is_its_state_dict(make: Callable[[], torch.nn.Module]) -> None:
    for module in (make(), nested(make())):
        expected = module.state_dict()
        found = module_state(module)
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


class Training:
    """A model with its optimizer, each step a snapshot, checked against what the parts themselves say."""

    def __init__(self, shm: Path) -> None:
        place = Place(0, 1, 0, 1, 0)
        self.shm, self.writer, self.framework = shm, SnapshotWriter(shm, place, 0), Torch(place, launched=False)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 80))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.extra: Any = {"ema": [0.5, float("inf")], "note": None}
        self.step = 0

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()

    def check(self) -> None:
        self.step += 1
        parts = {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}
        self.writer.write(self.step, *self.framework.capture(parts), pin=False)
        assert all(h.valid for h in holdings(self.shm, [0], verify=True))
        found = read_snapshot(self.shm, 0, [0], self.step)
        model = found.shared["model"] | found.own["parts"]["model"]
        plain = {key: value.detach() for key, value in self.model.state_dict().items()}
        assert same({key: model[key] for key in plain}, dict(plain))
        assert len(model) == len(plain)
        assert same(found.shared["optimizer"], self.optimizer.state_dict())
        assert same(found.own["parts"]["extra"], self.extra)


def test_every_change_of_a_state_is_in_the_next_snapshot(shm: Path) -> None:
    training = Training(shm)
    model, optimizer = training.model, training.optimizer

    def more_parameters() -> None:
        model.append(torch.nn.Linear(80, 2))
        optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.3})

    def other_state_tensor() -> None:
        optimizer.state[model[0].weight]["exp_avg"] = torch.full((300, 4), 9.0)

    def data_of_another_shape() -> None:
        model[1].running_mean.data = torch.arange(7.0)

    def same_shape_elsewhere() -> None:
        model[0].weight.data = torch.randn(4, 300).t()

    def scalar_becomes_tensor() -> None:
        training.extra["note"] = torch.ones(3)

    def other_type() -> None:
        model[1].running_var = model[1].running_var.half()

    def types_again() -> None:
        model[1].running_mean, model[1].running_var = torch.zeros(300), torch.ones(300)

    changes: list[Callable[[], Any]] = [
        training.train,  # the optimizer's state comes into being
        training.train,
        lambda: optimizer.param_groups[0].update(lr=0.05),
        lambda: optimizer.param_groups[0].update(betas=(0.8, 0.9)),
        lambda: optimizer.param_groups[0].update(lr=torch.tensor(0.2)),
        lambda: model[1].running_mean.add_(1),
        lambda: setattr(model[1], "running_mean", torch.full((300,), 5.0)),
        same_shape_elsewhere,
        other_state_tensor,
        other_type,
        data_of_another_shape,
        types_again,
        more_parameters,
        training.train,
        lambda: optimizer.state.pop(model[2].bias),
        lambda: training.extra["ema"].append(float("nan")),
        lambda: training.extra.update(ema=[]),
        scalar_becomes_tensor,
        lambda: training.extra.update(note={"a": 1}),
        lambda: model.register_buffer("late", torch.ones(5)),
        lambda: model.__delattr__("late"),
        lambda: model[2].register_parameter("bias", None),
    ]
    training.check()
    for change in changes:
        change()
        training.check()
        training.check()


def test_what_can_no_longer_be_saved_is_named_in_a_later_snapshot_too(shm: Path) -> None:
    training = Training(shm)
    training.check()
    training.extra["note"] = {1, 2}
    with pytest.raises(StateError, match=r"own/parts/extra/note: a builtins.set"):
        training.check()


BIG = CHUNK // 4 + 1000  # of float32, more than one piece
ARRAYS: dict[str, Callable[[], Any]] = {
    "small": lambda: torch.arange(5.0),
    "big": lambda: torch.randn(BIG),
    "exactly one piece": lambda: torch.randn(CHUNK // 4),
    "just large": lambda: torch.randn(LARGE // 4),
    "gradient": lambda: torch.nn.Parameter(torch.randn(300, 300)),
    "transposed": lambda: torch.randn(500, 700).t(),
    "strided": lambda: torch.randn(2 * BIG)[::2],
    "channels last": lambda: torch.randn(4, 16, 40, 40).contiguous(memory_format=torch.channels_last),
    "view with an offset": lambda: torch.randn(BIG + 3)[3:],
    "expanded": lambda: torch.randn(1, 200).expand(300, 200),
    "conjugated": lambda: torch.randn(200, 200, dtype=torch.complex64).conj().resolve_conj(),
    "negated": lambda: torch.randn(200, 200, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(BIG).bfloat16(),
    "bool": lambda: torch.randn(2 * LARGE) > 0,
    "no element": lambda: torch.empty(0, 3),
    "one": lambda: torch.tensor(3, dtype=torch.int8),
    "numpy": lambda: np.random.default_rng(0).normal(size=BIG),
    "numpy in Fortran's order": lambda: np.asfortranarray(np.random.default_rng(0).normal(size=(300, 200))),
    "numpy, strided": lambda: np.arange(2 * BIG)[::2],
    "numpy, big-endian": lambda: np.arange(BIG).astype(">f8"),
    "numpy, read only": lambda: np.frombuffer(b"x" * 2 * LARGE, np.uint8),
    "numpy scalar": lambda: np.float16(2.5),
}


def test_a_copy_has_every_byte_and_its_checksum() -> None:
    arrays = {name: make() for name, make in ARRAYS.items()}
    specs = [spec_of(name, array) for name, array in arrays.items()]
    layout = lay_out(specs)
    memory, base = mmap.mmap(-1, layout.size + 300), 64
    copier = Copier(memory, base, layout.size + 50, specs, layout)  # with a rest that belongs to the image
    for again in range(2):
        checksum = copier.copy(list(arrays.values())).intdigest()
        image = memory[base : base + layout.size + 50]
        assert checksum == xxhash.xxh3_64_intdigest(image)
        found = locate(memoryview(image))
        for spec, array in zip(specs, arrays.values(), strict=True):
            expected = (
                array.detach().contiguous() if spec.kind == "torch" else np.ascontiguousarray(array) if spec.kind == "numpy" else array
            )
            assert same(materialize(spec, found[spec.path]), expected), spec.path
        arrays = {name: array * 1 if again else array for name, array in arrays.items()}


def test_what_ddp_was_told_to_ignore_is_the_ranks_own_and_so_is_its_optimizer() -> None:
    framework = Torch(Place(0, 1, 0, 1, 0), launched=False)
    framework._alone = False
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    model = torch.nn.parallel.DistributedDataParallel(net)
    parts = {
        "model": model,
        "all": torch.optim.SGD(net.parameters(), 0.1),
        "equal": torch.optim.SGD(net[2].parameters(), 0.1),
        "ignored": torch.optim.SGD([net[0].weight], 0.1),
    }
    shared, own = framework.capture(parts)
    assert set(shared["model"]) == {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert set(own["parts"]["model"]) == {"0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert (shared.keys(), own["parts"].keys()) == ({"model", "equal"}, {"model", "all", "ignored"})
    assert "lead" not in own
    framework.close()
