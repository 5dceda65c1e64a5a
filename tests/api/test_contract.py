"""The whole OpenAPI document against a real server: nothing is answered that the document does not tell.

Every call is generated from the document, valid and invalid ones, to a server whose jobs are in several states and to one that has none,
with the token and without. 503 is allowed where it tells when to try again: no cluster stands behind these servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from orchestrator.core.actions import JobStep
from orchestrator.core.model import Attempt, Event
from orchestrator.core.states import AttemptState, JobState
from tests.api.conftest import TOKEN, Running
from tests.store.values import T0, checkpoint, incident, rank
from workers.messages import NodePlace

CHECKS = [content_type_conformance, response_headers_conformance, response_schema_conformance, status_code_conformance]
FINAL = "ended"
STATES = {"waits": JobState.PENDING, "trains": JobState.RUNNING, "mends": JobState.RECOVERING, FINAL: JobState.FAILED}
STEP = 17


@schemathesis.serializer("application/zip")
def _zip(_: schemathesis.SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def fill(server: Running) -> list[str]:
    """Jobs in several states with a history; their names."""
    for name, state in STATES.items():
        job_id = server.submit(name=name, resources={"processes_per_node": 2}, labels={"team": name})["id"]
        if state is JobState.PENDING:
            continue
        job = server.control.store.job(job_id)
        assert job is not None
        known = replace(
            job, state=state, reason="Told", attempt=2, generation=3, step=STEP, best_step=18,
            metrics={"loss": float("nan")}, started_at=T0,
            unreachable_since=T0, open_incidents=(incident(job),), ended_at=T0 if state.final else None,
        )  # fmt: skip
        attempt = Attempt(job_id, 2, AttemptState.ENDED, (NodePlace(0, "ab"),), 1, 0, 2, T0, ranks=(rank(0), rank(1)), ended_at=T0)
        events = (Event(job_id, T0, "RankKilled", "killed \ud800", "attempt-2", 1, 2, 3, 1),)
        server.control.store.save_step(JobStep(known, attempt, events, (incident(job),), (checkpoint(job, STEP),)))
    return list(STATES)


def operations(server: Running) -> Iterator[Any]:
    """From the document; those that delete come last."""
    document = server.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.address)
    found = [result.ok() for result in schema.get_all_operations()]
    assert len(found) > 20
    yield from sorted(found, key=lambda operation: operation.method == "delete")


def broken(server: Running, refs: list[str], examples: int, token: str | None = TOKEN) -> dict[str, str]:
    """What is wrong, by operation."""
    found = {}
    for operation in operations(server):
        run = hypothesis.settings(
            max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(hypothesis.given(st.data())(_caller(operation, refs, token)))  # fmt: skip
        try:
            run()
        except Exception as error:
            found[operation.label] = str(error)
    return found


def _caller(operation: Any, refs: list[str], token: str | None) -> Callable[[Any], None]:
    calls = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode))

    def call(data: st.DataObject) -> None:
        case = data.draw(calls)
        if refs and "ref" in case.path_parameters:
            case.path_parameters["ref"] = data.draw(st.sampled_from(refs))
        if "step" in case.path_parameters:
            case.path_parameters["step"] = data.draw(st.sampled_from([case.path_parameters["step"], STEP]))
        if "follow" in (case.query or {}) and case.path_parameters["ref"] != FINAL:
            del case.query["follow"]  # such a stream ends with its job
        answer = case.call(headers={"Authorization": f"Bearer {token}"} if token else {}, timeout=20)
        told = f"{case.as_curl_command()}\n{answer.status_code} {answer.text[:500]}"
        assert answer.status_code < 500 or (answer.status_code == 503 and answer.headers["retry-after"]), told
        case.validate_response(answer, checks=CHECKS)

    return call


@pytest.mark.parametrize("filled", [True, False])
def test_every_answer_is_in_the_document(server: Running, filled: bool) -> None:
    assert broken(server, fill(server) if filled else [], examples=15) == {}


def test_every_answer_without_the_token_is_in_the_document(server: Running) -> None:
    assert broken(server, fill(server), examples=3, token=None) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("filled", [True, False])
def test_many_more_answers_are_in_the_document(server: Running, filled: bool) -> None:
    assert broken(server, fill(server) if filled else [], examples=300) == {}
