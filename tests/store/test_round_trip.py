"""What is written is what is read, to the last bit and character."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from orchestrator.adapters.db.store import SqlStore
from orchestrator.core.actions import JobStep
from orchestrator.core.model import Event
from workers.messages import ErrorReport

from .values import T0, checkpoint, full_step, incident, known, new_job, ordered, rank, spec, submitted

NAMES = ("训练🚀", "e\u0301", "é", "-rf", "CON.", "a'; DROP TABLE jobs; --", 'quo"te', "%s {} \\n", "x" * 200, "İi̇", "عربى")


def _defaults_left(value: Any) -> list[str]:
    return [field.name for field in fields(value) if field.default is not MISSING and getattr(value, field.name) == field.default]


def test_every_field_comes_back(store: SqlStore) -> None:
    job = new_job(1, spec=spec("all", env={"A": "é"}, labels={"team": "vision"}))
    store.add_job(job, submitted(job), None, "h")
    asked = store.save_intent(ordered(job), Event(job.id, T0, "CancelRequested", "by the user"))
    step = full_step(asked)
    saved = store.save_step(step)

    assert saved == replace(step.job, version=3)
    assert store.job(job.id) == saved
    assert store.attempts(job.id) == [step.attempt]
    assert store.incidents(job.id, 10, None) == (list(step.incidents), None)
    assert store.checkpoints(job.id, 10, None)[0] == [known(job, 17), known(job, 16, verified_at=T0 + 7, problem="flipped é\\x00")]
    found, _ = store.events(job.id, 10, None)
    assert [replace(event, id=None) for event in found] == [
        submitted(job),
        Event(job.id, T0, "CancelRequested", "by the user"),
        *step.events,
    ]
    assert [event.id for event in found] == sorted({event.id for event in found})
    assert store.open_jobs() == ([saved], {job.id: step.attempt})


def test_the_values_above_leave_no_field_at_its_default() -> None:
    job = new_job(1)
    step = full_step(ordered(job))
    assert _defaults_left(step.job) == ["version"]
    assert step.attempt is not None
    for value in (step.attempt, incident(job), checkpoint(job, 1), replace(step.events[0], id=1)):
        assert _defaults_left(value) == []


@pytest.mark.parametrize("name", NAMES)
def test_names_are_kept_exactly(store: SqlStore, name: str) -> None:
    job = new_job(1, name=name, spec=spec(name, labels={"n": name[:60]}))
    store.add_job(job, submitted(job), None, "h")
    found = store.job(name)
    assert found is not None
    assert found == job
    assert found.name.encode() == name.encode()
    assert store.jobs(None, {"n": name[:60]}, 10, None)[0] == [job]


def test_composed_and_decomposed_letters_are_two_names(store: SqlStore) -> None:
    job = new_job(1, name="e\u0301")
    store.add_job(job, submitted(job), None, "h")
    assert store.job("é") is None


def test_arguments_are_kept_byte_for_byte(store: SqlStore) -> None:
    command = ("./run", "", " ", "a b", "\t\n\r", "'\"\\", "$HOME", '--x={"a": [1]}', "\u007f\u0085\u2028\ufeff", "🚀" * 1000)
    job = new_job(1, spec=spec("argv").model_copy(update={"command": command}))
    store.add_job(job, submitted(job), None, "h")
    found = store.job(job.id)
    assert found is not None
    assert found.spec.command == command


def test_a_loss_that_is_no_number_is_saved(store: SqlStore) -> None:
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    store.save_step(JobStep(replace(job, metrics={"loss": math.nan, "grad": math.inf, "min": -math.inf, "ok": 1.0}), None))
    found = store.job(job.id)
    assert found is not None
    assert math.isnan(found.metrics["loss"])
    assert (found.metrics["grad"], found.metrics["min"], found.metrics["ok"]) == (math.inf, -math.inf, 1.0)


def test_raw_program_output_never_makes_a_write_fail(store: SqlStore) -> None:
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    dirty = "a\0b \udcff é"
    step = full_step(job)
    assert step.attempt is not None
    bad_rank = replace(rank(0), error=ErrorReport(dirty, dirty, dirty, dirty))
    store.save_step(
        replace(
            step,
            attempt=replace(step.attempt, ranks=(bad_rank,), message=dirty),
            incidents=(incident(job, excerpt=dirty),),
            events=(Event(job.id, T0, "Said", dirty),),
        )
    )
    shown = "a\\x00b \\udcff é"
    assert store.incidents(job.id, 1, None)[0][0].excerpt == shown
    assert store.events(job.id, 9, None)[0][-1].message == shown
    (attempt,) = store.attempts(job.id)
    assert attempt.message == shown
    assert attempt.ranks[0].error is not None
    assert attempt.ranks[0].error.message.endswith("\\udcff é")


def test_questions_that_no_database_can_hold_find_nothing(store: SqlStore) -> None:
    for text in ("a\0b", "\udcff"):
        assert store.job(text) is None
        assert store.jobs(None, {text: "x"}, 5, None) == ([], None)
        assert store.jobs(None, {"x": text}, 5, None) == ([], None)
        assert store.jobs(text, {}, 5, None) == ([], None)
        assert store.attempts(text) == []
        assert store.events(text, 5, None) == ([], None)


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/St_Johns"])
def test_instants_are_the_same_in_every_time_zone(empty_url: str, store: SqlStore, zone: str) -> None:
    job = new_job(1)
    store.add_job(job, submitted(job), None, "h")
    store.save_step(full_step(job))
    program = (
        "import sys, time; from orchestrator.adapters.db.engine import open_engine; from orchestrator.adapters.db.store import SqlStore\n"
        "job = SqlStore(open_engine(sys.argv[1])).job(sys.argv[2])\n"
        "print(repr(job.created_at), repr(job.started_at), time.tzname[0])"
    )
    environment = os.environ | {"TZ": zone, "PGTZ": zone}
    out = subprocess.run(
        [sys.executable, "-c", program, empty_url, job.id], env=environment, capture_output=True, text=True, check=True
    ).stdout
    created_at, started_at, name = out.split()
    assert (float(created_at), float(started_at)) == (job.created_at, T0 + 0.75)
    assert name != "UTC"
