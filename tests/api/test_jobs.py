"""Submitting and looking at jobs over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from api.schemas import utc
from tests.api.conftest import Running

ARGV = ["python", "show.py", "a b", "{'k':{'n':1}}", "", "--x=$HOME", "é\n", "*", '"', "\\", "训练🚀", "\u2028"]


def test_submit_get_list_cancel(server: Running) -> None:
    job = server.submit(name="first", labels={"team": "vision"}, priority=70, resources={"nodes": 2, "processes_per_node": 3})
    assert (job["state"], job["reason"], job["world_size"], job["priority"]) == ("PENDING", "Submitted", 6, 70)
    assert job["budgets"]["infrastructure"] == {"used": 0, "limit": 20}
    assert job["created_at"].endswith("Z")
    assert server.http.get(f"/api/v1/jobs/{job['id']}").json() == job
    assert server.http.get("/api/v1/jobs/first").json() == job
    assert server.http.get("/api/v1/jobs?state=PENDING&label=team=vision").json() == {"items": [job], "next_cursor": None}
    assert server.http.get("/api/v1/jobs?label=team=audio").json()["items"] == []
    for part in ("attempts", "ranks", "incidents", "checkpoints"):
        assert server.http.get(f"/api/v1/jobs/first/{part}").json() == {"items": [], "next_cursor": None}
    first, second = (server.http.post("/api/v1/jobs/first/cancel", json={"grace_s": 5}).json() for _ in range(2))
    assert first == second
    server.control.reconciler.once()
    assert server.http.get("/api/v1/jobs/first").json()["state"] == "CANCELLED"
    events = server.http.get("/api/v1/jobs/first/events").json()["items"]
    assert (events[0]["reason"], events[-1]["reason"]) == ("Submitted", "Cancelled")
    assert len({event["id"] for event in events}) == len(events)


def test_delete_takes_an_ended_job_with_all_that_is_kept_of_it(server: Running) -> None:
    job = server.submit(name="gone")
    path = f"/api/v1/jobs/{job['id']}"
    folder = server.state_dir / "storage" / "jobs" / job["id"]
    (folder / "logs").mkdir(parents=True)
    refused = server.http.delete(path)
    assert (refused.status_code, refused.json()["code"]) == (409, "job_not_final")
    server.http.post(f"{path}/cancel")
    server.control.reconciler.once()
    by_name = server.http.delete("/api/v1/jobs/gone")
    assert (by_name.status_code, by_name.json()["code"]) == (409, "id_needed")
    assert server.http.delete(path).status_code == 204
    assert not folder.exists()
    assert server.http.get(path).status_code == 404
    assert server.http.delete(path).status_code == 404


def test_cancel_needs_no_body_but_refuses_a_bad_one(server: Running) -> None:
    job = server.submit()
    bad = server.http.post(f"/api/v1/jobs/{job['id']}/cancel", json={"grace_s": "soon", "force": True})
    assert bad.status_code == 422
    assert {error["field"] for error in bad.json()["errors"]} == {"grace_s", "force"}
    assert server.http.post(f"/api/v1/jobs/{job['id']}/cancel").status_code == 200


def test_argv_comes_back_byte_for_byte(server: Running) -> None:
    job = server.submit(command=ARGV)
    assert server.http.get(f"/api/v1/jobs/{job['id']}").json()["spec"]["command"] == ARGV


@pytest.mark.parametrize("name", ["训练🚀", "e\u0301", "-rf", "CON.", "a?b#c%d&e=f", "[bold]x", "x" * 200, "plan", "a\\b", "\ufeffx"])
def test_odd_names_are_kept_and_found(server: Running, name: str) -> None:
    job = server.submit(name=name)
    found = server.http.get(f"/api/v1/jobs/{quote(name, safe='')}")
    assert found.status_code == 200, found.text
    assert (found.json()["id"], found.json()["name"]) == (job["id"], name)


@pytest.mark.parametrize("name", ["", " ", "a/../../b", "x" * 300, "a\x00b", "..", "a\nb", " a", 7, None, "job-aaaaaaaaaaaa"])
def test_names_that_cannot_be_used_are_refused(server: Running, name: Any) -> None:
    answer = server.http.post("/api/v1/jobs", json=server.spec(name=name))
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["name"]
    assert server.http.get("/api/v1/jobs").json()["items"] == []


def test_same_name_twice_is_two_jobs(server: Running) -> None:
    first, second = server.submit(name="twin"), server.submit(name="twin")
    assert first["id"] != second["id"]
    answer = server.http.post("/api/v1/jobs/twin/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "ambiguous_name")
    assert first["id"] in answer.json()["detail"]
    assert second["id"] in answer.json()["detail"]


def test_nonsense_sizes_give_one_error_for_each_field(server: Running) -> None:
    for value in (0, -1, 1.5, "2", True, 10**9, 10**30, None, [], {}):
        answer = server.http.post("/api/v1/jobs", json=server.spec(resources={"nodes": value}))
        assert (answer.status_code, [e["field"] for e in answer.json()["errors"]]) == (422, ["resources.nodes"]), value
    answer = server.http.post(
        "/api/v1/jobs",
        json=server.spec(
            resources={"nodes": 0, "processes_per_node": 0, "cpus_per_node": "many"},
            restart={"max_infrastructure": -1}, timeouts={"grace_s": "soon"}, colour="red",
        ),
    )  # fmt: skip
    assert answer.headers["content-type"] == "application/problem+json"
    fields = [error["field"] for error in answer.json()["errors"]]
    expected = {"resources.nodes", "resources.processes_per_node", "resources.cpus_per_node", "restart.max_infrastructure",
                "timeouts.grace_s", "colour"}  # fmt: skip
    assert sorted(fields) == sorted(expected)
    assert all(error["message"] for error in answer.json()["errors"])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b'{"name": "\xff"}', b'{"name": "\\ud800"}', b"[" * 100_000])
def test_bodies_that_are_no_spec(server: Running, body: bytes) -> None:
    answer = server.http.post("/api/v1/jobs", content=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")


def test_body_limit_holds_on_what_comes(server: Running) -> None:
    def endless() -> Any:
        for _ in range(300):
            yield b" " * 65536

    answer = server.http.post("/api/v1/jobs", content=endless())
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def test_same_key_and_body_is_the_same_job(server: Running) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = server.http.post("/api/v1/jobs", json=server.spec(), headers=headers)
    # Another spelling of the same spec: defaults written out, other order.
    same = dict(reversed(server.spec(priority=50, resources={"nodes": 1}).items()))
    second = server.http.post("/api/v1/jobs", content=json.dumps(same, indent=3), headers=headers)
    other = server.http.post("/api/v1/jobs", json=server.spec(priority=51), headers=headers)
    assert (first.status_code, second.status_code, other.status_code) == (201, 200, 409)
    assert first.json()["id"] == second.json()["id"]
    assert first.headers["Location"] == f"/api/v1/jobs/{first.json()['id']}"
    assert other.json()["code"] == "idempotency_key_reused"
    assert len(server.http.get("/api/v1/jobs").json()["items"]) == 1


def test_twenty_at_once_with_one_key_make_one_job(server: Running) -> None:
    def post(_: int) -> httpx.Response:
        return httpx.post(
            f"{server.address}/api/v1/jobs", json=server.spec(), headers={**server.http.headers, "Idempotency-Key": "same"}, timeout=60
        )

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1


@pytest.mark.parametrize("key", ["", "x" * 201, "a b"])
def test_keys_that_are_none(server: Running, key: str) -> None:
    answer = server.http.post("/api/v1/jobs", json=server.spec(), headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Idempotency-Key"


def test_pages_and_bad_parameters(server: Running) -> None:
    ids = [server.submit(name=f"j{n}")["id"] for n in range(5)]
    found, cursor = [], None
    while True:
        page = server.http.get("/api/v1/jobs", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        found += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == ids[::-1]
    for query, field in [("limit=0", "limit"), ("limit=201", "limit"), ("limit=x", "limit"), ("state=NOPE", "state"), ("label=x", "label"),
                         ("cursor=nonsense", "cursor")]:  # fmt: skip
        answer = server.http.get(f"/api/v1/jobs?{query}")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_what_is_not_there_and_what_does_not_answer(server: Running) -> None:
    for path in ("", "/ranks", "/attempts", "/events", "/incidents", "/checkpoints", "/logs"):
        answer = server.http.get(f"/api/v1/jobs/nobody{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
    unavailable = server.http.get("/api/v1/nodes")
    assert (unavailable.status_code, unavailable.json()["code"]) == (503, "unavailable")
    assert int(unavailable.headers["Retry-After"]) > 0
    assert server.http.get("/api/v1/nowhere").json()["code"] == "no_such_route"
    assert server.http.delete("/api/v1/jobs").json()["code"] == "method_not_allowed"


def test_drill_needs_a_running_job(server: Running) -> None:
    job = server.submit()
    answer = server.http.post(f"/api/v1/jobs/{job['id']}/drills", json={"fault": "kill", "rank": 0})
    assert (answer.status_code, answer.json()["code"]) == (409, "job_not_running")
    bad = server.http.post(f"/api/v1/jobs/{job['id']}/drills", json={"fault": "explode", "rank": -1})
    assert {error["field"] for error in bad.json()["errors"]} == {"fault", "rank"}


def test_plan_without_a_cluster_says_so_and_changes_nothing(server: Running) -> None:
    answer = server.http.post("/api/v1/jobs/plan", json=server.spec()).json()
    assert (answer["fits"], answer["reason"]) == (False, "Unreachable")
    assert server.http.get("/api/v1/jobs").json()["items"] == []


def test_storage_must_be_possible(server: Running, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cases = {f"{tmp_path}/file/below": "is a file", "foo://bucket/x": "not known", "gs://bucket/x": "gcsfs"}
    for storage, says in cases.items():
        for path in ("/api/v1/jobs", "/api/v1/jobs/plan"):
            answer = server.http.post(path, json=server.spec(checkpoint={"storage": storage}))
            assert (answer.status_code, answer.json()["code"]) == (422, "storage_unusable"), answer.text
            (problem,) = answer.json()["errors"]
            assert problem["field"] == "checkpoint.storage"
            assert says in problem["message"]
    assert server.http.get("/api/v1/jobs").json()["items"] == []


def test_bundle_must_be_there(server: Running) -> None:
    answer = server.http.post("/api/v1/jobs", json=server.spec(bundle="0" * 64))
    assert (answer.status_code, answer.json()["code"], answer.json()["errors"][0]["field"]) == (422, "bundle_not_found", "bundle")


def test_openapi_names_problems_limits_and_the_spec(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            if path.startswith("/api/v1"):
                assert {"401", "503"} <= set(operation["responses"]), (method, path)
    spec = schema["components"]["schemas"]["JobSpec"]
    assert spec["properties"]["name"]["maxLength"] == 200
    assert schema["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/JobSpec")
    references = {ref for ref in _references(schema) if ref.rsplit("/", 1)[1] not in schema["components"]["schemas"]}
    assert references == set()


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(_references, node.values()))
    return set().union(*map(_references, node)) if isinstance(node, list) else set()


def test_times_are_utc_with_z() -> None:
    assert utc(0.0) == "1970-01-01T00:00:00.000Z"
    assert utc(1790000000.1234) == "2026-09-21T14:13:20.123Z"
