"""What user code holds, in this process: parts, errors, the environment. Whole runs are in test_exact."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workers.agreement import Agreement, Alone
from workers.board import Board
from workers.checkpoint.catalog import catalog
from workers.checkpoint.slots import holdings
from workers.checkpoint.tree import StateError, flatten
from workers.checkpoint.writer import commit, write_share
from workers.data import Batches
from workers.environment import BadEnvironment, read_environment
from workers.frameworks.plain import Plain
from workers.frameworks.torch import Torch, load
from workers.run import Run


def rank(shm: Path | None, **variables: str) -> Run:
    if shm is not None:
        Board.create(shm / "board-0", 0, 0)
        variables = {"KEEPSTEP_SHM": str(shm), "KEEPSTEP_SNAPSHOT_EVERY": "1"} | variables
    return Run(read_environment(variables), Plain())


def again(shm: Path, step: int) -> Run:
    return rank(shm, KEEPSTEP_RESTORE=json.dumps({"step": step, "source": "memory", "staged": None}))


def test_a_tree_is_returned_and_passed_on(shm: Path) -> None:
    run = rank(shm)
    state = run.restore(state={"w": np.zeros(3)}).state
    for _ in range(3):
        state = {"w": state["w"] + 1}
        run.step(state=state, loss=torch.tensor(2.0))
    found = again(shm, 3).restore(state={"w": np.zeros(3)})
    assert (found.step, found.source, found.state["w"].tolist()) == (3, "memory", [3.0, 3.0, 3.0])
    assert Board.open(shm / "board-0").read().restored == 3


def test_random_generators_go_on(shm: Path) -> None:
    import random

    run, draw = rank(shm), np.random.default_rng(3)
    run.restore(draw=draw)
    random.seed(1)
    np.random.seed(1)
    draw.random()
    run.step()
    expected = (random.random(), np.random.rand(), draw.random())
    other = np.random.default_rng(99)
    again(shm, 1).restore(draw=other)
    assert (random.random(), np.random.rand(), other.random()) == expected


def test_a_python_generator_and_numpys_old_one_go_on(shm: Path) -> None:
    import random

    run, draw, old = rank(shm), random.Random(3), np.random.RandomState(3)
    run.restore(draw=draw, old=old)
    draw.random(), old.rand()
    run.step()
    expected = (draw.gauss(0, 1), old.rand())
    other, older = random.Random(99), np.random.RandomState(99)
    again(shm, 1).restore(draw=other, old=older)
    assert (other.gauss(0, 1), older.rand()) == expected


def test_numpys_state_and_scalars_are_state_a_dataclass_is_refused_at_the_first_save(shm: Path) -> None:
    @dataclass
    class Best:
        loss: float = 1.0

    state = {"numpy": np.random.get_state(), "best": np.float32(0.1), "seen": np.int64(7)}
    run = rank(shm)
    run.restore(state=state)
    run.step()
    found = again(shm, 1).restore(state=None).state
    assert (found["best"], type(found["best"]), type(found["seen"])) == (state["best"], np.float32, np.int64)
    assert np.array_equal(found["numpy"][1], state["numpy"][1])
    np.random.set_state(found["numpy"])
    late = rank(shm)
    late.restore(state={"best": Best()})
    with pytest.raises(StateError, match=r"own/parts/state/best: a .*Best cannot be saved; keep arrays, numbers"):
        late.step()


def test_a_loader_without_a_position_is_refused_at_once_with_the_remedy() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    with pytest.raises(StateError, match=r"data is a torch DataLoader, which has no position to save; .*Batches.*StatefulDataLoader"):
        rank(None).restore(data=loader)


def test_alone_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = rank(None)
    assert run.restore(state=1).step == 0
    run.step(loss=1)
    run.finish()
    assert run.steps == 1
    assert list(tmp_path.iterdir()) == []


def test_a_leaf_that_cannot_be_saved_ends_training_at_the_first_step(shm: Path) -> None:
    run = rank(shm)
    run.restore(state={"model": {"hook": print}})
    with pytest.raises(StateError, match=r"own/parts/state/model/hook: a builtins.builtin_function_or_method cannot be saved"):
        run.step()


@pytest.mark.parametrize(
    ("parts", "words"),
    [({"model": 1}, r"has the parts \['state'\], the script names \['model'\]"), ({"state": 1, "extra": 1}, "name the same parts")],
)
def test_other_parts_than_saved_are_refused(shm: Path, parts: dict[str, Any], words: str) -> None:
    run = rank(shm)
    run.restore(state=1)
    run.step()
    with pytest.raises(StateError, match=words):
        again(shm, 1).restore(**parts)


def test_restore_once_and_first(shm: Path) -> None:
    run = rank(shm)
    with pytest.raises(StateError, match="cannot be named 'step'"):
        run.restore(step=1)
    run.restore()
    with pytest.raises(StateError, match="called twice"):
        run.restore()
    late = rank(shm)
    late.step()
    with pytest.raises(StateError, match="before the first step"):
        late.restore()


def test_metrics_that_are_not_finite_are_counted_on_the_board(shm: Path) -> None:
    """The first step of each, and since when they persist: three reports in a row, whatever lies between them."""
    run = rank(shm)
    board = Board.open(shm / "board-0")
    seen = []
    for loss in (1.0, math.nan, 1.0, math.inf, None, 1e400, -math.inf, 2.0):
        run.step(**({} if loss is None else {"loss": loss}))
        seen.append(board.read().nonfinite_since)
    assert seen == [0, 0, 0, 0, 0, 0, 4, 0]
    assert board.read().nonfinite == {"loss": 2}


def test_a_checkpoint_tells_whether_metrics_were_finite_when_it_was_taken(shm: Path, tmp_path: Path) -> None:
    run = rank(shm)
    run.restore(state=1)
    for loss in (1.0, math.nan, math.nan, math.nan, 1.0):
        run.step(loss=loss)
        if run.steps in (3, 4, 5):
            share = write_share(shm, str(tmp_path), run.steps, 1, 0, 0, 1, [0])
            commit(str(tmp_path), "job", 1, 0, run.steps, 1, [share], 0.0, 1.0)
    assert [(c.step, c.finite) for c in catalog(str(tmp_path))] == [(5, True), (4, False), (3, True)]


@pytest.mark.parametrize("loss", ["nan", "1.5", b"1"])
def test_a_metric_in_quotes_is_no_number(shm: Path, loss: Any) -> None:
    with pytest.raises(ValueError, match=r"metric 'loss' is a (str|bytes); pass a number"):
        rank(shm).step(loss=loss)


def test_a_metric_that_is_no_number_is_named(shm: Path) -> None:
    with pytest.raises(ValueError, match="metric 'loss' is a list"):
        rank(shm).step(loss=[1, 2])


def test_phases(shm: Path) -> None:
    run = rank(shm)
    board = Board.open(shm / "board-0")
    run.step()
    with run.phase("eval"):
        assert board.read().phase == "eval"
    assert board.read().phase == "step"
    with pytest.raises(ValueError, match="nap"):
        run.phase("nap").__enter__()


def test_an_interval_that_is_posted_late_counts_from_then_on(shm: Path) -> None:
    framework = Plain()
    framework.store = Alone()
    Board.create(shm / "board-1", 0, 0)
    variables = {"KEEPSTEP_SHM": str(shm), "KEEPSTEP_SNAPSHOT_EVERY": "auto", "KEEPSTEP_RANK": "1", "KEEPSTEP_WORLD_SIZE": "2"}
    run = Run(read_environment(variables | {"KEEPSTEP_LOCAL_RANK": "1", "KEEPSTEP_LOCAL_WORLD_SIZE": "2"}), framework)
    run.restore(state=np.zeros(3))
    taken = []
    for step in range(1, 25):
        if step == 13:
            Agreement(framework.store, 0, 2).post_interval(8, 5)
        run.step()
        taken += [h.step for h in holdings(shm, [1], verify=False) if h.step == step]
    assert taken == [*range(1, 13), 15, 20]


def test_full_shared_memory_costs_snapshots_not_training(
    shm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = rank(shm)
    run.restore(state=np.zeros(3))
    monkeypatch.setattr(os, "posix_fallocate", full)
    run.step()
    run.step()
    assert run.steps == 2
    assert capsys.readouterr().err.count("no more of them, and no more checkpoints") == 1
    assert holdings(shm, [0], verify=True) == []


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "x"}, "RANK is 'x'; a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"KEEPSTEP_SHM": "/dev/shm/x", "KEEPSTEP_EVERY_STEPS": "-1"}, "KEEPSTEP_EVERY_STEPS is '-1'"),
        ({"KEEPSTEP_RESTORE": "{}"}, "KEEPSTEP_RESTORE is '{}'"),
    ],
)
def test_bad_environment_is_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(BadEnvironment) as refused:
        read_environment(variables)
    assert words in str(refused.value)


def test_torchruns_variables_place_a_rank_without_keepstep() -> None:
    found = read_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (found.place.rank, found.place.world_size, found.place.local_rank, found.shm) == (3, 4, 1, None)


SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_state_of_every_common_schedule_can_be_saved(make: Any) -> None:
    model = torch.nn.Linear(2, 2)
    flatten(make(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)).state_dict())


@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta", "LBFGS"]
)
def test_state_of_every_common_optimizer_can_be_saved(kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    flatten(optimizer.state_dict())


def test_importing_workers_imports_no_framework() -> None:
    code = "import sys, workers, workers.run, workers.checkpoint.catalog, workers.checkpoint.writer, workers.checkpoint.slots;"
    code += "print([m for m in ('ray','torch','tensorflow','keras','jax','sqlalchemy','fastapi','pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_optimizer_state_wider_than_its_parameter_keeps_its_bits() -> None:
    def made() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.1, momentum=0.9)

    optimizer, other = made(), made()
    wide = torch.tensor([0.1, 0.2, 0.3])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = wide
    load(other, optimizer.state_dict())
    found = other.state[other.param_groups[0]["params"][0]]["momentum_buffer"]
    assert found.dtype == torch.float32
    assert torch.equal(found, wide)


def ending(shm: Path) -> tuple[Run, Batches]:
    """A run with a snapshot of step 2 whose newest step, 3, is kept by its end only."""
    run, data = rank(shm, KEEPSTEP_SNAPSHOT_EVERY="2"), Batches(20, 4)
    run.restore(data=data, state=np.zeros(3))
    for _, _ in zip(range(3), data, strict=False):
        run.step()
    return run, data


def kept(shm: Path) -> int:
    return max(holding.step for holding in holdings(shm, [0], verify=True))


def test_the_end_keeps_the_last_step(shm: Path) -> None:
    run, _ = ending(shm)
    assert kept(shm) == 2
    run.finish()
    assert (kept(shm), Board.open(shm / "board-0").read().phase) == (3, "done")


def test_data_that_was_taken_for_a_step_that_never_ended_is_not_kept(shm: Path) -> None:
    run, data = ending(shm)
    next(iter(data))
    run.finish()
    assert kept(shm) == 2
    assert again(shm, 2).restore(data=data, state=None).data.state_dict()["sample"] == 8


def test_an_end_with_another_code_than_0_keeps_nothing(shm: Path) -> None:
    run, _ = ending(shm)
    run.fail()
    run.finish()
    assert (kept(shm), Board.open(shm / "board-0").read().phase) == (2, "step")


@pytest.mark.parametrize(("asks", "step", "phase"), [(False, 2, "step"), (True, 3, "done")])
def test_after_sigterm_the_end_keeps_the_last_step_of_a_script_that_knew(shm: Path, asks: bool, step: int, phase: str) -> None:
    run, _ = ending(shm)
    run._told_to_stop = True
    assert not asks or run.should_stop
    run.finish()
    assert (kept(shm), Board.open(shm / "board-0").read().phase) == (step, phase)


@pytest.mark.parametrize("end", ["optimizer.step()", "next(iter(loader))"])
def test_a_torch_step_that_never_ended_is_not_kept(shm: Path, end: str) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = torch.nn.Linear(1, 1)
    optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), StatefulDataLoader(range(9))
    Board.create(shm / "board-0", 0, 0)
    for told in ("", end):
        variables = {"KEEPSTEP_SHM": str(shm), "KEEPSTEP_SNAPSHOT_EVERY": "2"}
        environment = read_environment(variables)
        run = Run(environment, Torch(environment.place, launched=False))
        run.restore(model=model, optimizer=optimizer, loader=loader)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            optimizer.step()
            run.step()
        exec(told, {"optimizer": optimizer, "loader": batches})
        run.finish()
        assert kept(shm) == (2 if told else 3)


FORKS = """
import os, signal, sys, time
import numpy as np
import workers

before = signal.getsignal(signal.SIGTERM)
run = workers.start("plain")
run.restore(state=np.zeros(3))
run.step(), run.step(), run.step()
child = os.fork()
if child == 0:
    assert signal.getsignal(signal.SIGTERM) == before
    run.step()  # of the child's own
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print(workers.board.Board.open(sys.argv[1]).read().phase, workers.board.Board.open(sys.argv[1]).read().step)
"""


def test_a_child_that_the_script_forks_ends_as_itself(shm: Path) -> None:
    Board.create(shm / "board-0", 0, 0)
    variables = {"KEEPSTEP_SHM": str(shm), "KEEPSTEP_SNAPSHOT_EVERY": "2", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-c", FORKS, str(shm / "board-0")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("step 3\n", 0), done.stderr
    assert (kept(shm), Board.open(shm / "board-0").read().phase) == (3, "done")


def test_a_number_of_steps_that_nobody_can_keep_is_refused(shm: Path) -> None:
    run = rank(shm)
    run.restore(state={"w": np.zeros(3)})
    run.steps = 2**53 - 2
    run.step()
    with pytest.raises(ValueError, match=r"run.steps: 9007199254740992 is no number of finished steps"):
        run.step()
    assert Board.open(shm / "board-0").read().step == 2**53 - 1


def test_a_script_that_replaces_the_time_changes_no_time_of_ours(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rank(shm)
    run.restore(state={"w": np.zeros(3)})
    really = time.time()
    monkeypatch.setattr(time, "time", lambda: really + 400 * 86400)
    run.step()
    assert Board.open(shm / "board-0").read().step_at == pytest.approx(really, abs=60)
