"""What the ranks of one group saved, for a rank of another: equal, put together, derived, or refused by its path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workers.checkpoint.elastic import adapt, consents
from workers.checkpoint.format import Tree
from workers.checkpoint.shards import SCATTERED, boxes, sharded
from workers.checkpoint.tree import StateError, flatten
from workers.frameworks.plain import Plain


def saved(parts: dict[str, Any], random: Any = 0, **more: Any) -> dict[str, Any]:
    return {"parts": parts, "random": {"python": random}} | more


def test_what_is_equal_is_taken_and_does_not_alias_what_was_read() -> None:
    tree = {"w": np.array([1.0, np.nan]), "t": (torch.ones(2, dtype=torch.bfloat16), None), "n": float("nan")}
    owns = [saved({"state": tree}) for _ in range(2)]
    found = adapt(owns, 2, []).own["parts"]["state"]
    assert np.array_equal(found["w"], tree["w"], equal_nan=True)
    assert torch.equal(found["t"][0], tree["t"][0])
    found["w"][0] = 5.0
    assert tree["w"][0] == 1.0


@pytest.mark.parametrize(
    ("a", "b", "path"),
    [
        ({"x": np.zeros(2)}, {"x": np.array([0.0, -0.0])}, "state/x"),
        ({"x": [1, 2]}, {"x": [1, 3]}, "state/x/1"),
        ({"x": [1]}, {"x": [1, 2]}, "state/x"),
        ({"x": 1}, {"x": 1.0}, "state/x"),
        ({"x": 1}, {"y": 1}, "state"),
        ({"x": torch.zeros(1)}, {"x": torch.zeros(1, dtype=torch.float64)}, "state/x"),
    ],
)
def test_what_differs_is_refused_by_its_path(a: Any, b: Any, path: str) -> None:
    with pytest.raises(StateError, match=f"state at {path} differs between the ranks that saved it"):
        adapt([saved({"state": a}), saved({"state": b})], 0, [])


def test_what_was_not_foreseen_is_refused() -> None:
    with pytest.raises(StateError, match="state at extra cannot be given"):
        adapt([saved({}, extra=1)], 0, [])
    with pytest.raises(StateError, match="middle of an accumulation window, whose gradients belong to 1 ranks"):
        adapt([saved({}, window={"gradients": {}, "unsynced": ["model"]})], 0, [])


def test_shards_are_put_together_and_scattered_values_collected() -> None:
    owns = [
        saved({"model": {"w": sharded((4,), ["S(0)"], (2 * rank,), np.full(2, rank))}, "zero": {SCATTERED: {5 - rank: {"m": rank}}}})
        for rank in range(2)
    ]
    found = adapt(owns, 0, []).own["parts"]
    assert [box.offset for box in boxes(found["model"]["w"])] == [(0,), (2,)]
    assert found["zero"] == {SCATTERED: {4: {"m": 1}, 5: {"m": 0}}}


def test_buffers_that_all_take_from_rank_0_are_its() -> None:
    owns = [saved({"model": {"mean": rank}}, lead=["model"]) for rank in range(2)]
    assert adapt(owns, 1, []).own["parts"] == {"model": {"mean": 0}}


@pytest.mark.parametrize(
    ("states", "rank", "state", "derived"),
    [([1, 2], 1, 2, False), ([1, 2], 2, 1, True), ([7, 7], 2, 7, False), ([7], 0, 7, False), ([7], 1, 7, True)],
)
def test_new_ranks_derive_random_numbers_unless_all_had_the_same(states: list[int], rank: int, state: int, derived: bool) -> None:
    found = adapt([saved({}, random=each) for each in states], rank, [])
    assert found.own["random"] == {"python": state}
    assert found.derive == (("python",) if derived else ())


def test_a_named_generator_of_one_rank_stays_the_same_on_all_for_it_may_order_the_data() -> None:
    assert adapt([saved({"draw": 7})], 1, ["draw"]).derive == ("python",)
    assert adapt([saved({"draw": 7}), saved({"draw": 8})], 2, ["draw"]).derive == ("draw",)


def test_derived_generators_depend_on_the_saved_state_and_the_rank() -> None:
    import random

    def drawn(seed: int, rank: int) -> tuple[float, ...]:
        random.seed(seed)
        np.random.seed(seed)
        made: dict[str, Any] = {
            "p": random.Random(seed),
            "n": np.random.default_rng(seed),
            "o": np.random.RandomState(seed),
            "t": torch.Generator().manual_seed(seed),
        }
        Plain().derive(["python", "numpy", *made], made, rank)
        named = made["p"].random(), made["n"].random(), made["o"].rand(), torch.rand(1, generator=made["t"]).item()
        return random.random(), np.random.rand(), *named

    assert drawn(1, 2) == drawn(1, 2)
    for other in (drawn(1, 3), drawn(2, 2)):
        assert not set(other) & set(drawn(1, 2))


def test_consent_is_that_of_all_ranks() -> None:
    def tree(own: dict[str, Any]) -> Tree:
        return Tree(flatten(own)[0], [])

    assert consents([tree({"parts": {}, "elastic": True})])
    assert not consents([tree({"parts": {}, "elastic": True}), tree({"parts": {}})])
