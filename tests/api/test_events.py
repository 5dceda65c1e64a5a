"""The history of a job as a stream."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from api import eventstream
from api.client import Client, LogEvent
from tests.api.conftest import TOKEN, Running


def follow(server: Running, job: str, since: str | None = None) -> Iterator[LogEvent]:
    client = Client(server.address, TOKEN)
    try:
        yield from client.follow(f"/jobs/{job}/events", since)
    finally:
        client.close()


def test_events_come_as_they_are_recorded_and_the_end_last(server: Running) -> None:
    job = server.submit(name="followed")["id"]
    stream = follow(server, "followed")
    first = next(stream)
    assert (first.kind, first.data["reason"]) == ("event", "Submitted")
    server.http.post(f"/api/v1/jobs/{job}/cancel")
    server.control.reconciler.once()
    rest = list(stream)
    page = server.http.get(f"/api/v1/jobs/{job}/events").json()["items"]
    assert [event.data for event in [first, *rest[:-1]]] == page
    assert [event.id for event in [first, *rest[:-1]]] == [str(item["id"]) for item in page]
    assert (rest[-1].kind, rest[-1].data["state"]) == ("end", "CANCELLED")
    assert [event.data for event in follow(server, job, first.id)] == [event.data for event in rest]


def test_a_bad_id_is_refused_and_a_job_that_is_not_there_is_not_found(server: Running) -> None:
    job = server.submit()["id"]
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "yesterday"}
    bad = server.http.get(f"/api/v1/jobs/{job}/events", headers=headers)
    assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "Last-Event-ID")
    assert server.http.get("/api/v1/jobs/none/events", headers={"Accept": "text/event-stream"}).status_code == 404


def test_a_silent_stream_shows_that_it_lives(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eventstream, "ALIVE_S", 0.0)
    job = server.submit()["id"]
    with server.http.stream("GET", f"/api/v1/jobs/{job}/events", headers={"Accept": "text/event-stream"}) as answer:
        assert any(line == ": waiting" for line in answer.iter_lines())


def test_the_command_follows_to_the_end(server: Running) -> None:
    job = server.submit()["id"]
    command = [sys.executable, "-m", "api.cli", "events", "-f", job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        first = follower.stdout.readline()
        server.http.post(f"/api/v1/jobs/{job}/cancel")
        server.control.reconciler.once()
        rest, told = follower.communicate(timeout=60)
    assert follower.returncode == 0, told
    assert "Submitted: submitted as" in first
    assert "Cancelled: " in rest.splitlines()[-1]
