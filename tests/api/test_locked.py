"""Another process holds the whole SQLite file: a backup, a shell that was left open."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from orchestrator.adapters.db import engine
from tests.api.conftest import Running

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(server: Running) -> Iterator[Callable[[], None]]:
    """The file is locked by another process until what this gives is called."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, server.state_dir / "keepstep.db"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder.stdin.close


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ``server``: half a second is as long as any writer waits."""
    monkeypatch.setattr(engine, "WAIT_S", 0.5)


@pytest.fixture
def looked_after(server: Running) -> Iterator[Running]:
    server.control.reconciler.start()
    yield server
    server.control.reconciler.stop()


def submit(server: Running, name: str) -> httpx.Response:
    return server.http.post("/api/v1/jobs", json=server.spec(name=name), headers={"Idempotency-Key": name})


def until_seen(server: Running, name: str) -> None:
    """The reconciler has saved its first decision about the job."""
    deadline = time.monotonic() + 20
    while server.http.get(f"/api/v1/jobs/{name}").json()["reason"] == "Submitted":
        assert time.monotonic() < deadline, f"nobody looked at {name}"
        time.sleep(0.02)


def test_submits_wait_for_a_lock_of_eight_seconds(looked_after: Running) -> None:
    with held(looked_after) as release, ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(submit, looked_after, f"job-{number}") for number in range(20)]
        threading.Timer(8.0, release).start()
        answers = [each.result() for each in waiting]
    assert [answer.status_code for answer in answers] == [201] * 20
    assert len(looked_after.http.get("/api/v1/jobs").json()["items"]) == 20
    until_seen(looked_after, "job-19")
    assert looked_after.control.reconciler.errors == 0


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_stays_is_told_and_the_loop_goes_on_behind_it(looked_after: Running) -> None:
    assert submit(looked_after, "before").status_code == 201
    until_seen(looked_after, "before")
    with held(looked_after) as release:
        refused = [submit(looked_after, f"job-{number}") for number in range(2)]
        assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(503, "unavailable")] * 2
        assert all(int(answer.headers["Retry-After"]) > 0 for answer in refused)
        assert looked_after.http.get("/api/v1/jobs/before").status_code == 200  # reading goes on
        cancelled = looked_after.http.post("/api/v1/jobs/before/cancel")
        assert (cancelled.status_code, cancelled.json()["code"]) == (503, "unavailable")
        release()
    assert [answer.status_code for answer in (submit(looked_after, "job-0"), submit(looked_after, "job-1"))] == [201] * 2
    assert [job["name"] for job in looked_after.http.get("/api/v1/jobs").json()["items"]] == ["job-1", "job-0", "before"]
    until_seen(looked_after, "job-1")
    assert looked_after.control.reconciler.errors == 0
