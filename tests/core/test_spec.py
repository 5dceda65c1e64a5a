"""What a job spec takes, and one clear message for each field that it does not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.core.spec import JobSpec, dump
from orchestrator.core.spec_errors import problems

BASE: dict[str, Any] = {"name": "a", "framework": "pytorch", "command": ["python", "train.py"]}


def told(**changes: Any) -> dict[str, str]:
    """field -> message for a spec that is refused."""
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({**BASE, **changes})
    found = problems(caught.value)
    assert len({p.field for p in found}) == len(found)
    return {p.field: p.message for p in found}


@pytest.mark.parametrize("name", ["训练🚀", "e\u0301", "-rf", "CON.", "a b", "x" * 200, "job-1", "ＪＯＢ", "job-aaaaaaaaaaaaa"])
def test_a_name_is_kept_exactly(name: str) -> None:
    spec = JobSpec.model_validate({**BASE, "name": name})
    assert spec.name == name
    assert JobSpec.model_validate(dump(spec)) == spec


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "too short"),
        (" ", "blank"),
        ("a ", "blank"),
        ("a/../../b", "'/'"),
        ("..", "'..'"),
        ("x" * 201, "1 to 200"),
        ("a\x00b", "control"),
        ("a\u2028b", "control"),
        ("a\x7f", "control"),
        ("\ud800", "surrogates"),
        ("job-abcdefghijk2", "job id"),
        (7, "string"),
        (None, "string"),
    ],
)
def test_a_name_that_cannot_be_used(name: object, says: str) -> None:
    assert says in told(name=name)["name"]


ARGV = ["python", "show.py", "a b", "{'k':{'n':1}}", "", "--x=$HOME", "é\n", "*", '"', "\\", "\u202e"]


def test_a_command_is_kept_byte_for_byte() -> None:
    spec = JobSpec.model_validate({**BASE, "command": ARGV})
    assert list(spec.command) == ARGV
    assert dump(JobSpec.model_validate_json(spec.model_dump_json()))["command"] == ARGV


@pytest.mark.parametrize(
    ("command", "field", "says"),
    [
        ([], "command", "1 to 1000"),
        ([""], "command", "first"),
        (["a", "b\0"], "command", "NUL"),
        (["a", 1], "command.1", "string"),
        ("python train.py", "command", "list"),
        (["a"] * 1001, "command", "1000"),
        (["a", "é" * 65536], "command", "131072"),
        (None, "command", "list"),
    ],
)
def test_a_command_that_cannot_be_run(command: object, field: str, says: str) -> None:
    assert says in told(command=command)[field]


NONSENSE: list[tuple[str, str, Any]] = [
    ("resources", "nodes", 0),
    ("resources", "nodes", -1),
    ("resources", "nodes", 1.5),
    ("resources", "nodes", "2"),
    ("resources", "nodes", True),
    ("resources", "nodes", 10**9),
    ("resources", "nodes", None),
    ("resources", "processes_per_node", 0),
    ("resources", "processes_per_node", 65),
    ("resources", "min_nodes", 2),
    ("resources", "gpus_per_node", -1),
    ("resources", "cpus_per_node", 0),
    ("resources", "cpus_per_node", float("nan")),
    ("resources", "cpus_per_node", True),
    ("resources", "memory_gb", float("inf")),
    ("resources", "devices_per_node", 2),
    ("resources", "gpus", 1),
    ("restart", "max_user_errors", -1),
    ("restart", "max_infrastructure", "many"),
    ("restart", "window_hours", 0),
    ("timeouts", "grace_s", "soon"),
    ("timeouts", "grace_s", 3601),
    ("timeouts", "hang_s", "never"),
    ("timeouts", "hang_s", 0),
    ("timeouts", "silence_s", 0),
    ("success", "steps", 0),
    ("success", "files", "out.pt"),
    ("timeouts", "run_hours", -1),
    ("checkpoint", "keep_last", 1),
    ("checkpoint", "every_steps", 0),
    ("checkpoint", "every_steps", "2"),
    ("checkpoint", "every_steps", True),
    ("checkpoint", "every_seconds", 0),
    ("checkpoint", "every_seconds", "often"),
    ("checkpoint", "storage", "relative/path"),
    ("checkpoint", "snapshot_every_steps", 0.5),
]


@pytest.mark.parametrize(("section", "field", "value"), NONSENSE)
def test_nonsense_is_named_by_its_field(section: str, field: str, value: object) -> None:
    assert list(told(**{section: {field: value}})) == [f"{section}.{field}"]


def test_every_bad_field_is_told_once() -> None:
    found = told(
        name="", command=[], priority="high", color="red", resources={"nodes": "2", "processes_per_node": 0}, timeouts={"hang_s": "x"}
    )
    assert set(found) == {"name", "command", "priority", "color", "resources.nodes", "resources.processes_per_node", "timeouts.hang_s"}
    assert "1 to 1000" in found["resources.nodes"]
    assert "known here: name, framework" in found["color"]


def test_too_many_ranks_are_refused_as_impossible() -> None:
    assert "64000 ranks" in told(resources={"nodes": 1000, "processes_per_node": 64})["resources.processes_per_node"]


@pytest.mark.parametrize(
    ("framework", "given", "chosen"),
    [("pytorch", None, "ddp"), ("pytorch", "ddp", "ddp"), ("tensorflow", None, "mirrored"), ("plain", None, None)],
)
def test_the_strategy_follows_the_framework(framework: str, given: str | None, chosen: str | None) -> None:
    assert JobSpec.model_validate({**BASE, "framework": framework, "strategy": given}).strategy == chosen


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"framework": "jax"}, "framework", "cannot be run yet"),
        ({"framework": "mxnet"}, "framework", "not one of"),
        ({"framework": "tensorflow", "strategy": "multi_worker_mirrored"}, "strategy", "mirrored"),
        ({"framework": "tensorflow", "strategy": "parameter_server"}, "strategy", "this version runs"),
        ({"framework": "plain", "strategy": "ddp"}, "strategy", "leave it out"),
        ({"framework": "tensorflow", "resources": {"nodes": 2}}, "resources.nodes", "one node"),
        ({"framework": "tensorflow", "resources": {"processes_per_node": 2}}, "resources.processes_per_node", "devices_per_node"),
        (
            {"framework": "tensorflow", "resources": {"gpus_per_node": 1, "devices_per_node": 2}},
            "resources.devices_per_node",
            "gpus_per_node",
        ),
        ({"working_dir": "."}, "working_dir", "the CLI uploads it"),
        ({"bundle": "A" * 64}, "bundle", "64 lower-case"),
        ({"env": {"KEEPSTEP_X": "1"}}, "env.KEEPSTEP_X", "is set by KeepStep for each rank; remove it"),
        ({"command": [True]}, "command.0", "quotes, got True"),
        ({"timeouts": {"hang_s": -1}}, "timeouts.hang_s", "is out of range, got -1"),
        ({"checkpoint": {"storage": "file://here"}}, "checkpoint.storage", "absolute"),
        ({"env": {"1A": "x"}}, "env.1A", "letters"),
        ({"env": {"A": 1}}, "env.A", "quotes"),
        ({"env": {"A": "\0"}}, "env", "NUL"),
        ({"labels": {"a=b": "x"}}, "labels.a=b", "letters"),
    ],
)
def test_what_cannot_be_run_says_what_can(changes: dict[str, Any], field: str, says: str) -> None:
    found = told(**changes)
    assert list(found) == [field]
    assert says in found[field]


def test_names_that_are_reserved_are_told_beside_values_that_are_wrong() -> None:
    assert sorted(told(env={"A": 1, "RANK": "0", "MASTER_PORT": "1"})) == ["env.A", "env.MASTER_PORT", "env.RANK"]


def test_limits_are_in_the_schema() -> None:
    schema = JobSpec.model_json_schema()
    nodes = schema["$defs"]["Resources"]["properties"]["nodes"]
    assert (nodes["minimum"], nodes["maximum"]) == (1, 1000)
    assert "1 to 1000" in nodes["description"]
    assert schema["properties"]["name"]["maxLength"] == 200
