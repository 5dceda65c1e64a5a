"""Pages: every row once, whatever is written between two pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.adapters.db.store import SqlStore
from orchestrator.core.actions import JobStep
from orchestrator.core.model import Event, Job
from orchestrator.core.states import JobState
from orchestrator.ports import BadCursor

from .values import T0, checkpoint, incident, new_job, spec, submitted


def _add(store: SqlStore, number: int, **fields: Any) -> Job:
    job = new_job(number, **fields)
    store.add_job(job, submitted(job), None, "h")
    return job


def _all(page: Callable[[str | None], tuple[list[Any], str | None]], between: Callable[[], object] = lambda: None) -> list[Any]:
    items, cursor = page(None)
    while cursor is not None:
        between()
        more, cursor = page(cursor)
        items += more
    return items


def test_jobs_come_newest_first_and_once_while_others_are_added(store: SqlStore) -> None:
    # Three share an instant, so the page border falls between equals.
    old = [_add(store, number, created_at=T0 + number // 3) for number in range(10)]
    added = iter(range(100, 200))
    found = _all(lambda cursor: store.jobs(None, {}, 3, cursor), between=lambda: _add(store, next(added)))
    assert [job.id for job in found] == [job.id for job in sorted(old, key=lambda job: (job.created_at, job.id), reverse=True)]


def test_the_last_page_has_no_cursor_even_if_it_is_full(store: SqlStore) -> None:
    for number in range(4):
        _add(store, number)
    _, cursor = store.jobs(None, {}, 2, None)
    page, end = store.jobs(None, {}, 2, cursor)
    assert (len(page), end) == (2, None)
    assert store.jobs(None, {}, 4, None)[1] is None


def test_filters_hold_over_pages(store: SqlStore) -> None:
    for number in range(12):
        job = _add(store, number, spec=spec("x", labels={"team": "ab"[number % 2], "tier": "x"}))
        if number % 3 == 0:
            store.save_step(JobStep(replace(job, state=JobState.RUNNING), None))
    wanted = [new_job(number).id for number in (9, 3)]
    found = _all(lambda cursor: store.jobs("RUNNING", {"team": "b", "tier": "x"}, 1, cursor))
    assert [job.id for job in found] == wanted
    assert store.jobs("RUNNING", {"team": "b", "tier": "y"}, 5, None) == ([], None)
    assert store.jobs("NOSUCH", {}, 5, None) == ([], None)


def test_histories_page_in_order(store: SqlStore) -> None:
    job, other = _add(store, 1), _add(store, 2)
    saved = job
    for number in range(7):
        saved = store.save_step(
            JobStep(
                saved,
                None,
                events=(Event(job.id, T0, f"E{number}", "same instant"),),
                incidents=(incident(job, generation=number),),
                checkpoints=(checkpoint(job, number),),
            )
        )
        store.save_intent(replace(other, version=1 + number), Event(other.id, T0, "Other", "another job"))
    events = _all(lambda cursor: store.events(job.id, 3, cursor))
    assert [event.reason for event in events] == ["Submitted", *(f"E{number}" for number in range(7))]
    incidents = _all(lambda cursor: store.incidents(job.id, 2, cursor))
    assert [found.generation for found in incidents] == list(range(7))
    checkpoints = _all(lambda cursor: store.checkpoints(job.id, 2, cursor))
    assert [found.step for found in checkpoints] == list(range(6, -1, -1))


def test_the_cursor_of_one_list_is_no_cursor_of_another(store: SqlStore) -> None:
    job = _add(store, 1)
    _add(store, 2)
    store.save_step(JobStep(job, None, events=(Event(job.id, T0, "E", "e"),)))
    of_jobs, of_events = store.jobs(None, {}, 1, None)[1], store.events(job.id, 1, None)[1]
    with pytest.raises(BadCursor, match="not one of the list of events"):
        store.events(job.id, 1, of_jobs)
    with pytest.raises(BadCursor, match="not one of the list of jobs"):
        store.jobs(None, {}, 1, of_events)


@pytest.mark.parametrize(
    "cursor", ["", "x", "é", "\0", "====", "W10", "bnVsbA", "WyJqb2JzIl0", "WyJqb2JzIiwxLDJd", "WyJqb2JzIix0cnVlLCJhIl0", "9" * 500]
)
def test_nonsense_is_no_cursor(sqlite_store: SqlStore, cursor: str) -> None:
    with pytest.raises(BadCursor):
        sqlite_store.jobs(None, {}, 5, cursor)
