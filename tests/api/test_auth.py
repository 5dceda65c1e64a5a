"""Every route asks for the token before it looks at anything else."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPResponse

import httpx
import pytest

from api.auth import OPEN
from tests.api.conftest import TOKEN, Running

WRONG = [
    None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN.upper()}",
    f"Bearer {TOKEN} {TOKEN}", f"Bearer,{TOKEN}", TOKEN, "Bearer \xe9", f"Bearer {TOKEN}\xe9", f"Bearer \xa0{TOKEN}",
]  # fmt: skip


def _calls(server: Running) -> list[tuple[str, str]]:
    schema = server.http.get("/openapi.json").json()
    calls = [(method.upper(), path) for path, methods in schema["paths"].items() for method in methods]
    assert len(calls) > 15
    filled = [(method, path.replace("{ref}", "x").replace("{sha256}", "0" * 64)) for method, path in calls]
    return [*filled, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/api/v1/nothing")]


def _answer_before_the_body(server: Running, method: str, path: str, authorization: str | None) -> HTTPResponse:
    """What comes when a body is announced and never sent."""
    connection = HTTPConnection(server.address.removeprefix("http://"), timeout=20)
    connection.putrequest(method, path)
    connection.putheader("Content-Length", "1000")
    if authorization is not None:
        connection.putheader("Authorization", authorization.encode("latin-1"))
    connection.endheaders()
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_no_route_answers_without_the_token(server: Running) -> None:
    for method, path in _calls(server):
        if path in OPEN:
            continue
        for wrong in WRONG:
            answer = _answer_before_the_body(server, method, path, wrong)
            assert answer.status == 401, (method, path, wrong)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["Content-Type"] == "application/problem+json"
            if method != "HEAD":
                problem = json.loads(answer.body)  # type: ignore[attr-defined]
                assert (problem["status"], problem["code"]) == (401, "not_authenticated")
                assert TOKEN not in str(problem)


def test_token_in_the_address_does_not_count(server: Running) -> None:
    assert httpx.get(f"{server.address}/api/v1/jobs?token={TOKEN}", trust_env=False).status_code == 401


def test_health_needs_no_token(server: Running) -> None:
    assert httpx.get(f"{server.address}/healthz", trust_env=False).json() == {"status": "ok"}
    assert httpx.get(f"{server.address}/readyz", trust_env=False).status_code == 503


def test_ready_only_while_the_reconciler_works(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first = server.http.get("/readyz")
    assert (first.status_code, first.json()["reconciler_pass_age_s"]) == (503, None)
    assert first.headers["Retry-After"]
    server.control.reconciler.once()
    ready = server.http.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["reconciler_pass_age_s"] < 20
    assert server.control.reconciler.last_pass_at is not None
    server.control.reconciler.last_pass_at -= 31
    late = server.http.get("/readyz")
    assert late.status_code == 503
    assert "has not finished a pass for 31 s" in late.json()["detail"]
