"""Nodes that cannot be made ready: a fault of the code ends the job, a fault of a node or of storage only this placement."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.workers.led import led, led_spec
from tests.workers.make import NOW, group, look, recovery, spec, status
from workers import agent
from workers.group import Doing
from workers.messages import FailureClass, Outcome
from workers.restart import TOLD_S, decide
from workers.workdir import UnusableBundle, prepare

USER, NODE, UNKNOWN = FailureClass.USER, FailureClass.INFRASTRUCTURE, FailureClass.UNKNOWN


def unready(index: int, kind: FailureClass | None) -> Any:
    """It tells a problem of this kind; None: it is not warm yet."""
    return status(index, ready=False) if kind is None else status(index, ready=False, problem="no", problem_kind=kind)


@pytest.mark.parametrize(
    ("nodes", "waited", "outcome", "reason", "blamed"),
    [
        pytest.param((status(0), unready(1, USER)), 1, Outcome.FAILED, "UserError", None, id="the code is at fault"),
        pytest.param((unready(0, None), unready(1, USER)), 1, Outcome.FAILED, "UserError", None, id="and nobody is awaited then"),
        pytest.param((status(0), unready(1, NODE)), 1, Outcome.LOST, "CannotStart", "n1", id="a disk of one node"),
        pytest.param((unready(0, NODE), unready(1, NODE)), 1, Outcome.LOST, "CannotStart", None, id="storage of all"),
        pytest.param((status(0), unready(1, UNKNOWN)), 1, Outcome.LOST, "CannotStart", "n1", id="the launcher of one node"),
        pytest.param((unready(0, UNKNOWN), unready(1, UNKNOWN)), 1, Outcome.FAILED, "UserError", None, id="launchers of all"),
        pytest.param((unready(0, None), unready(1, UNKNOWN)), 1, None, "", None, id="the others may tell the same"),
        pytest.param((unready(0, None), unready(1, UNKNOWN)), TOLD_S + 1, Outcome.LOST, "CannotStart", "n1", id="they tell nothing"),
        pytest.param((unready(0, UNKNOWN),), 1, Outcome.LOST, "CannotStart", "n0", id="the only node: another may do better"),
        pytest.param((status(0), unready(1, None)), 601, Outcome.LOST, "StartTimeout", "n1", id="one never warm"),
        pytest.param((unready(0, None), unready(1, None)), 601, Outcome.LOST, "StartTimeout", None, id="none warm"),
    ],
)
@pytest.mark.parametrize("began_with", [None, recovery(blamed_node="n9")])
def test_who_is_to_blame(nodes: Any, waited: float, outcome: Outcome | None, reason: str, blamed: str | None, began_with: Any) -> None:
    """At the first start, and in the middle of a recovery: the next placement takes the blamed node last."""
    before = group(Doing.WARMING, NOW - waited, recovery=began_with, given=spec(nodes=len(nodes)))
    after = decide(before, look(*nodes), NOW).group
    assert (after.outcome, after.reason) == (outcome, reason)
    if outcome is not None:
        (incident,) = after.incidents
        assert incident.action == ("relaunch" if outcome is Outcome.LOST else "stop")
        assert incident.blamed_node == (blamed or ("n9" if began_with else None))


def test_what_is_lost_at_the_first_start_is_paid_by_the_budget_of_infrastructure() -> None:
    after = decide(group(Doing.WARMING, NOW - 1), look(status(0), unready(1, NODE)), NOW).group
    assert [(f.kind, f.cause) for f in after.failures] == [(NODE, "cannot_start")]
    assert after.message == "node 1 cannot start the command: no"


@pytest.mark.parametrize(
    ("error", "times", "kind"),
    [
        pytest.param(OSError(5, "Input/output error"), 2, None, id="for a moment"),
        pytest.param(OSError(5, "Input/output error"), 9, NODE, id="for good"),
        pytest.param(UnusableBundle("no zip"), 1, USER, id="the code"),
    ],
)
def test_a_working_directory_that_cannot_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int, kind: FailureClass | None
) -> None:
    left = [error] * times

    def fails_at_first(*args: Any) -> Path:
        if left:
            raise left.pop()
        return prepare(*args)

    monkeypatch.setattr(agent, "PREPARE_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(agent, "prepare", fails_at_first)

    async def run() -> None:
        async with led(led_spec(tmp_path / "storage")) as one:
            await one.until(lambda: one.agents[0].status().ready or one.agents[0].status().problem, look=False)
            told = one.agents[0].status()
            assert (told.ready, told.problem_kind if told.problem else None) == (kind is None, kind)

    asyncio.run(run())
