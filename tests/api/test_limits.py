"""Every text that a client sends is bounded and understood in one way, or refused with its field, the limit and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from orchestrator.adapters.db import cursors
from tests.api.conftest import Running

REST = '"framework": "plain", "command": ["true"]'
LONG = "x" * 201

SPECS = {  # what stands beside a sound spec -> (field, part of the message)
    '"name": "a", "name": "b"': ("name", "occurs twice"),
    '"name": "a", "env": {"A": "1", "A": "1"}': ("env.A", "occurs twice"),
    '"name": "a", "resources": {"cpus_per_node": NaN}': ("resources.cpus_per_node", "must be a finite number"),
    '"name": "a", "resources": {"memory_gb": Infinity}': ("resources.memory_gb", "must be a finite number"),
    '"name": "a", "resources": {"memory_gb": -Infinity}': ("resources.memory_gb", "must be a finite number"),
    '"name": "a", "timeouts": {"grace_s": 1e999}': ("timeouts.grace_s", "must be a finite number"),
    '"name": "a", "success": {"steps": 9223372036854775808}': ("success.steps", "1 to 10^12"),
    f'"name": "a", "priority": {10**40}': ("priority", "0 to 100"),
    f'"name": "a", "priority": {"9" * 5000}': ("", "number out of range"),
    f'"name": "{LONG}"': ("name", "1 to 200 characters"),
    '"name": "a\\u0000"': ("name", "control characters; remove them"),
    '"name": "a", "labels": {"team": "\\u0000"}': ("labels.team", "without control characters"),
    '"name": "a", "checkpoint": {"storage": "/x\\u0000"}': ("checkpoint.storage", "must be an absolute path"),
    '"name": "a", "success": {"files": ["\\u0000"]}': ("success.files.0", "does not have the right form"),
    '"name": "a", "env": {"A": "\\u0000"}': ("env", "must not contain NUL"),
    '"name": "a\\ud800"': ("", "not valid JSON in UTF-8"),
    '"name": "a", "env": {"A": "\\udfff"}': ("", "not valid JSON in UTF-8"),
    f'"name": {"[" * 300}{"]" * 300}': ("", "recursion limit"),
    f'"name": "a", "env": {{"A": "{"x" * 200_000}"}}': ("env", "put long text into a file"),
}  # fmt: skip


@pytest.mark.parametrize("beside", SPECS, ids=lambda text: text[:40])
def test_specs(server: Running, beside: str) -> None:
    field, message = SPECS[beside]
    for path in ("jobs", "jobs/plan"):
        answer = server.http.post(f"/api/v1/{path}", content=f"{{{beside}, {REST}}}")
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
        (problem,) = answer.json()["errors"]
        assert problem["field"] == field
        assert message in problem["message"]
    assert server.http.get("/api/v1/jobs").json()["items"] == []


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'"x"', b"{}x", b"[" * 100_000, "{}".encode("utf-16"), b'{"name": "a\xed\xa0\x80"}'])
def test_bodies_that_are_no_mapping(server: Running, body: bytes) -> None:
    answer = server.http.post("/api/v1/jobs", content=body)
    assert (answer.status_code, [problem["field"] for problem in answer.json()["errors"]]) == (422, [""])


def test_other_bodies_have_limits_too(server: Running) -> None:
    job = server.submit()["id"]
    cases = [
        ("cancel", '{"grace_s": NaN}', "grace_s", "Seconds between SIGTERM and SIGKILL, 0 to 3600"),
        ("cancel", '{"grace_s": 3601}', "grace_s", "0 to 3600"),
        ("cancel", '{"grace_s": 1, "grace_s": 2}', "grace_s", "occurs twice"),
        ("cancel", '{"when": 1}', "when", "known here: grace_s"),
        ("drills", '{"fault": "kill", "rank": 9223372036854775808}', "rank", "at most 4095"),
        ("drills", '{"fault": "kill\\u0000"}', "fault", "is not one of the known values"),
    ]
    for verb, body, field, message in cases:
        answer = server.http.post(f"/api/v1/jobs/{job}/{verb}", content=body)
        assert answer.status_code == 422, body
        (problem,) = answer.json()["errors"]
        assert problem["field"] == field
        assert message in problem["message"]
    assert server.http.get(f"/api/v1/jobs/{job}").json()["state"] == "PENDING"


def test_bodies_are_counted_as_they_come(server: Running) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    for path in ("jobs", "jobs/plan", "jobs/a/cancel", "jobs/a/drills"):
        answer = server.http.post(f"/api/v1/{path}", content=endless())
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        assert "1048576 bytes" in answer.json()["detail"]


def test_of_many_bad_fields_a_hundred_are_told(server: Running) -> None:
    answer = server.http.post("/api/v1/jobs", json={f"f{number}": 1 for number in range(10_000)})
    assert len(answer.json()["errors"]) == 100
    assert answer.json()["detail"].endswith(" and 9983 more")  # name, framework and command are missing too


PARAMETERS = [
    ("jobs?limit=9223372036854775808", "limit", "1 to 200"),
    ("jobs?limit=1e3", "limit", "must be a whole number"),
    ("jobs?state=%00", "state", "PENDING, STARTING"),
    ("jobs?label=%00=x", "label", "name=value"),
    ("jobs?label=a=%00", "label", "name=value"),
    (f"jobs?label=a={LONG * 2}", "label", "264 characters"),
    ("jobs?label=a=1&label=a=2", "label", "asked for once"),
    ("jobs?" + "&".join(f"label=a{n}=1" for n in range(17)), "label", "up to 16 times"),
    ("jobs?cursor=%00", "cursor", "take next_cursor of the page before"),
    ("jobs?cursor=" + "x" * 501, "cursor", "500 characters"),
    *((f"jobs?cursor={cursors.encode('jobs', (at, name))}", "cursor", "leave it out")
      for at, name in [(float("nan"), "a"), (float("inf"), "a"), (1.0, "\ud800"), (1.0, "\0"), (1, "a"), ("1", "a")]),
    (f"jobs?cursor={cursors.encode('events', (1,))}", "cursor", "not one of the list of jobs"),
    (f"jobs/a/events?cursor={cursors.encode('events', (2**63,))}", "cursor", "leave it out"),
    ("jobs/a/attempts?cursor=9999999999", "cursor", "next_cursor"),
    (f"jobs/{LONG}", "ref", "1 to 200 characters"),
    ("jobs/a/logs?rank=4096", "rank", "0 to 4095"),
    ("jobs/a/logs?generation=9223372036854775808", "generation", "0 to 10^9"),
    ("jobs/a/logs?tail=-1", "tail", "0 to 10000"),
    ("jobs/a/logs?follow=perhaps", "follow", "true or false"),
    ("jobs/a/checkpoints/9223372036854775808/download", "step", "0 to 2^63 - 1"),
    (f"nodes/{LONG}", "ref", "1 to 200 characters"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "message"), PARAMETERS, ids=lambda text: text[:40])
def test_parameters(server: Running, path: str, field: str, message: str) -> None:
    server.submit(name="a")
    answer = server.http.get(f"/api/v1/{path}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    (problem,) = answer.json()["errors"]
    assert problem["field"] == field
    assert message in problem["message"]


@pytest.mark.parametrize(("name", "value", "path"), [
    ("Idempotency-Key", b"", "jobs"), ("Idempotency-Key", b"x" * 201, "jobs"), ("Idempotency-Key", b"a b", "jobs"),
    ("Idempotency-Key", "é".encode(), "jobs"), ("Last-Event-ID", b"9223372036854775808", "jobs/a/events"),
    ("Last-Event-ID", b"x", "jobs/a/events"), ("Last-Event-ID", b"x" * 50_000, "jobs/a/logs"),
])  # fmt: skip
def test_headers(server: Running, name: str, value: bytes, path: str) -> None:
    body = json.dumps(server.spec())
    server.submit(name="a")
    headers = [(name.encode(), value), (b"Accept", b"text/event-stream")]
    answer = server.http.request("POST" if path == "jobs" else "GET", f"/api/v1/{path}", headers=headers, content=body)
    assert (answer.status_code, [problem["field"] for problem in answer.json()["errors"]]) == (422, [name])


@pytest.mark.parametrize("path", ["jobs/%00", "jobs/%ED%A0%80", "jobs/%ff", "jobs/a%2Fb", "jobs/%00/events", "jobs/%00/logs"])
def test_names_that_no_job_can_have(server: Running, path: str) -> None:
    assert server.http.get(f"/api/v1/{path}").status_code == 404
