"""Every route asks for the token before it looks at anything else."""

from __future__ import annotations

import httpx
import pytest

from api.auth import OPEN
from tests.api.conftest import TOKEN, Running

WRONG = ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, "Bearer \xe9"]


def _calls(server: Running) -> list[tuple[str, str]]:
    schema = server.http.get("/openapi.json").json()
    calls = [(method.upper(), path) for path, methods in schema["paths"].items() for method in methods]
    assert len(calls) > 15
    filled = [(method, path.replace("{ref}", "x").replace("{sha256}", "0" * 64)) for method, path in calls]
    return [*filled, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/api/v1/nothing")]


def test_no_route_answers_without_the_token(server: Running) -> None:
    with httpx.Client(base_url=server.address, trust_env=False) as http:
        for method, path in _calls(server):
            if path in OPEN:
                continue
            for wrong in WRONG:
                answer = http.request(method, path, headers=[(b"Authorization", wrong.encode("latin-1"))] if wrong else [])
                assert answer.status_code == 401, (method, path, wrong)
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["code"] == "not_authenticated"


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
