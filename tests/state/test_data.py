"""The order of training data: each sample once per epoch, the same for any number of ranks, resumable at every batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from workers.checkpoint.tree import StateError
from workers.data import Batches


def epoch(length: int, batch: int, ranks: int, number: int = 0, **kw: Any) -> list[list[list[int]]]:
    """Sample numbers by step and rank."""
    parts = []
    for rank in range(ranks):
        data = Batches(length, batch, seed=7, rank=rank, world_size=ranks, **kw)
        for _ in range(number):
            list(data)
        assert data.epoch == number
        parts.append([b.tolist() for b in data])
    return [list(step) for step in zip(*parts, strict=True)]


@pytest.mark.parametrize(("length", "batch"), [(20, 4), (23, 4), (9, 9), (5, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_once(length: int, batch: int, ranks: int) -> None:
    seen = sorted(sample for step in epoch(length, batch, ranks) for part in step for sample in part)
    left_out = length % batch if length % batch < ranks else 0
    assert len(seen) == len(set(seen)) == length - left_out


def test_a_step_has_the_same_samples_for_any_number_of_ranks() -> None:
    merged = [[[sample for part in step for sample in part] for step in epoch(24, 6, ranks, number=2)] for ranks in (1, 2, 3)]
    assert merged[0] == merged[1] == merged[2]


def test_epochs_and_seeds_differ() -> None:
    assert epoch(20, 20, 1) != epoch(20, 20, 1, number=1)
    assert epoch(20, 20, 1, shuffle=False)[0][0] == list(range(20))
    other = Batches(20, 20, seed=8, rank=0, world_size=1)
    assert [next(iter(other)).tolist()] != epoch(20, 20, 1)[0]


@pytest.mark.parametrize("stop", range(12))
def test_resume_goes_on_with_the_very_next_batch(stop: int) -> None:
    def fresh() -> Batches:
        return Batches(22, 5, seed=1, rank=0, world_size=1)

    straight = fresh().forever()
    expected = [next(straight).tolist() for _ in range(16)]
    first = fresh()
    before = first.forever()
    seen = [next(before).tolist() for _ in range(stop)]
    second = fresh()
    second.load_state_dict(first.state_dict())
    after = second.forever()
    seen += [next(after).tolist() for _ in range(16 - stop)]
    assert seen == expected


def test_resume_with_other_ranks_goes_on_at_the_same_sample() -> None:
    one = Batches(24, 6, seed=1, rank=0, world_size=1)
    batches = iter(one)
    next(batches)
    rest = [b.tolist() for b in batches]
    back = [Batches(24, 6, seed=1, rank=r, world_size=2) for r in range(2)]
    for data in back:
        data.load_state_dict({"epoch": 0, "sample": 6, "length": 24, "seed": 1, "shuffle": True})
    assert [a.tolist() + b.tolist() for a, b in zip(*back, strict=True)] == rest


def test_arrays_tensors_and_tuples() -> None:
    x, y = np.arange(12).reshape(6, 2), torch.arange(6)
    got_x, got_y = next(iter(Batches((x, y), 3, seed=1, rank=0, world_size=1)))
    assert type(got_x) is np.ndarray
    assert type(got_y) is torch.Tensor
    assert got_x[:, 0].tolist() == [2 * i for i in got_y.tolist()]


def test_prefetched_batches_do_not_count() -> None:
    data = Batches(20, 5, seed=1, rank=0, world_size=1)
    data._by_steps = True  # as after dataset()
    ahead = list(data)
    assert data.state_dict()["sample"] == 0
    data.step_finished()
    assert data.state_dict()["sample"] == 5
    assert [b.tolist() for b in data] == [b.tolist() for b in ahead[1:]]
    for _ in range(3):
        data.step_finished()
    assert (data.epoch, data.state_dict()["sample"]) == (1, 0)


@pytest.mark.parametrize(
    ("kw", "words"),
    [
        ({"batch_size": 0}, "batch_size: 0"),
        ({"batch_size": 11}, "at most 10|to 10"),
        ({"batch_size": 1, "rank": 0, "world_size": 2}, "from 2"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank: 2, the limit is world_size - 1 = 1"),
    ],
)
def test_bad_arguments_are_named(kw: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Batches(10, **kw)


@pytest.mark.parametrize(("change", "words"), [({"length": 9}, "length"), ({"seed": 3}, "seed"), ({"sample": 3}, "inside of a batch")])
def test_a_position_in_other_data_is_refused(change: dict[str, int], words: str) -> None:
    data = Batches(10, 2, rank=0, world_size=1)
    with pytest.raises(StateError, match=words):
        data.load_state_dict(data.state_dict() | change)


def test_arrays_of_unequal_length() -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\] samples"):
        Batches((np.zeros(3), np.zeros(4)), 1)


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int, float]:
        return number, random.random()


def loaded(workers: int, skip: int, ranks: int = 1) -> list[list[tuple[int, float]]]:
    """Of each rank the (sample, draw) of one epoch after ``skip`` batches."""
    found = []
    for rank in range(ranks):
        data = Batches(22, 6, seed=2, rank=rank, world_size=ranks)
        data.load_state_dict(data.state_dict() | {"sample": 6 * skip})
        loader = data.loader(Numbers(22), num_workers=workers, collate_fn=list)
        found.append([pair for batch in loader for pair in batch])
        assert data.epoch == 1
    return found


def test_a_loader_gives_what_batches_give() -> None:
    data = Batches(22, 6, seed=2, rank=0, world_size=1)
    assert [pair[0] for pair in loaded(0, 0)[0]] == np.concatenate(list(data)).tolist()
    assert len(Batches(22, 6, seed=2, rank=0, world_size=1).loader(Numbers(22))) == 4


def test_what_a_worker_draws_depends_on_the_sample_only() -> None:
    (whole,) = loaded(1, 0)
    assert len({draw for _, draw in whole}) == 22
    assert loaded(2, 2)[0] == whole[12:]
    assert sorted(pair for part in loaded(1, 0, ranks=2) for pair in part) == sorted(whole)


def test_prefetch_leaves_the_position_and_torchs_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    data = Batches(22, 6, seed=2, rank=0, world_size=1)
    batches = iter(data.loader(Numbers(22), num_workers=2, prefetch_factor=2))
    next(batches)
    assert data.state_dict()["sample"] == 6
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [(21, {}, "dataset: 21 samples, Batches was made for 22"), (22, {"shuffle": True}, "shuffle: Batches decides it")],
)
def test_a_loader_that_contradicts_batches_is_refused(count: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Batches(22, 6).loader(Numbers(count), **options)


def test_a_dataset_that_can_only_be_iterated_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(22))

    with pytest.raises(ValueError, match="StatefulDataLoader"):
        Batches(22, 6).loader(Stream())
