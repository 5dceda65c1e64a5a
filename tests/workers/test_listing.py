"""Answers of storage that come too late, or never."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers.make import GENERATION, NOW, group, spec
from workers import listing as listings
from workers.checkpoint.catalog import CheckpointRef
from workers.checkpoint.lease import Fenced
from workers.group import Doing, Group
from workers.listing import Listing, read_catalog
from workers.messages import CheckpointFound, Problem, Unfit

FOUND = (CheckpointFound("/c/30", 30),)
ASKED = group(Doing.LOCATING, NOW)


@pytest.mark.parametrize(
    ("meanwhile", "kept"),
    [
        pytest.param(ASKED, True, id="in time"),
        pytest.param(group(Doing.TRAINING, NOW + 9, generation=GENERATION + 1), False, id="a generation trains, from memory"),
        pytest.param(group(Doing.LOCATING, NOW + 99, generation=GENERATION + 1), False, id="a later recovery asks itself"),
        pytest.param(group(Doing.LOCATING, NOW + 9), False, id="asked again, agents had gone"),
    ],
)
@pytest.mark.parametrize("refused", [False, True])
def test_an_answer_to_a_question_that_is_over_is_dropped(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Group, kept: bool, refused: bool
) -> None:
    now = [ASKED]

    def read(*asked: object) -> tuple[tuple[CheckpointFound, ...], int]:
        now[0] = meanwhile
        if refused:
            raise Fenced("generation 4 leads")
        return FOUND, 7

    monkeypatch.setattr(listings, "read_catalog", read)
    listing = Listing(spec(), lambda: now[0])
    asyncio.run(listing.read(NOW))
    assert listing.found == (FOUND if kept and not refused else None)
    assert listing.past_generation == (7 if kept and not refused else -1)
    assert (listing.refused is not None) is (kept and refused)


def test_what_was_listed_is_forgotten_once_ranks_run(tmp_path: Path) -> None:
    now = [ASKED]
    listing = Listing(spec(storage_url=str(tmp_path)), lambda: now[0])
    asyncio.run(listing.read(NOW))
    assert listing.found == ()
    for doing, found in ((Doing.STAGING, ()), (Doing.LOCATING, ()), (Doing.LAUNCHING, None)):
        now[0] = replace(ASKED, doing=doing)
        listing.keep_up()
        assert listing.found == found


def test_storage_that_never_answers_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(listings, "read_catalog", lambda *asked: released.wait(20))
    monkeypatch.setattr(listings, "READ_S", 0.05)
    listing = Listing(spec(), lambda: ASKED)
    asyncio.run(listing.read(NOW))
    released.set()
    assert listing.problem == "/storage/job-x did not answer within 0 s"


def test_what_another_job_has_written_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = spec(storage_url=str(tmp_path))
    refs = [CheckpointRef(f"/c/{step}", step, 1, 0, 2, None, True, True, job) for step, job in ((30, "job-other"), (20, given.job_id))]
    monkeypatch.setattr(listings, "catalog", lambda url: refs)
    foreign, own = read_catalog(given, 0)[0]
    assert (own.step, own.problem) == (20, None)
    assert (foreign.step, foreign.problem) == (30, Problem(Unfit.DAMAGED, "it was written by job job-other and copied here; remove it"))
