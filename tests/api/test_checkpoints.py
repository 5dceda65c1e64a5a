"""Checkpoints over REST and the command line, with real ones in storage."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load
from typer.testing import CliRunner

from api.cli import app
from api.commands.checkpoints import _known as known_of
from orchestrator.core.actions import JobStep
from tests.api.conftest import Running
from workers.checkpoint.catalog import remove
from workers.checkpoint.damage import change_a_byte
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.checkpoint.writer import commit, write_share
from workers.messages import CheckpointRecord


@pytest.fixture
def job(server: Running) -> tuple[str, list[CheckpointRecord]]:
    """A job with checkpoints of steps 10 and 20."""
    job_id = server.submit()["id"]
    shm, storage = server.state_dir / "shm", str(server.state_dir / "storage" / "jobs" / job_id)
    shm.mkdir()
    writer = SnapshotWriter(shm, Place(0, 1, 0, 1, 0), 0)
    records = []
    for step in (10, 20):
        writer.write(step, {"w": np.arange(70_000) + step}, {"parts": {"lr": 0.5}}, pin=False)
        share = write_share(shm, storage, step, 1, 0, 0, 1, [0])
        records.append(commit(storage, job_id, 1, 0, step, 1, [share], 1.0, 2.0 + step))
    known = server.control.store.job(job_id)
    assert known is not None
    server.control.store.save_step(JobStep(replace(known, message="trains"), None, checkpoints=tuple(records)))
    return job_id, records


@pytest.fixture
def ask(server: Running, job: tuple[str, list[CheckpointRecord]]) -> Callable[..., httpx.Response]:
    def one(method: str, rest: str = "") -> httpx.Response:
        return server.http.request(method, f"/api/v1/jobs/{job[0]}/checkpoints{rest}")

    return one


Ask = Callable[..., httpx.Response]


def listed(ask: Ask) -> list[tuple[int, bool, str | None, bool]]:
    """(step, was it read, problem, pinned)"""
    return [(c["step"], c["verified_at"] is not None, c["problem"], c["pinned"]) for c in ask("GET").json()["items"]]


def test_verify_tells_and_keeps_what_it_found(ask: Ask, job: tuple[str, list[CheckpointRecord]]) -> None:
    assert listed(ask) == [(20, False, None, False), (10, False, None, False)]
    assert [c["finite"] for c in ask("GET").json()["items"]] == [True, True]
    assert ask("POST", "/20/verify").json()["problem"] is None
    change_a_byte(job[1][0].url)
    damaged = ask("POST", "/10/verify")
    assert damaged.status_code == 200
    assert damaged.json()["problem"] == "shared-0.safetensors does not match its checksum, its bytes were changed"
    assert listed(ask) == [(20, True, None, False), (10, True, damaged.json()["problem"], False)]


def test_a_pin_keeps_it_from_retention(ask: Ask, job: tuple[str, list[CheckpointRecord]]) -> None:
    for _ in range(2):
        assert ask("POST", "/10/pin").json()["pinned"] is True
    assert listed(ask)[1] == (10, False, None, True)
    assert not remove(job[1][0].url)
    assert ask("POST", "/10/unpin").json()["pinned"] is False
    assert remove(job[1][0].url)
    gone = ask("POST", "/10/pin")
    assert (gone.status_code, gone.json()["code"]) == (404, "checkpoint_not_found")
    assert not Path(job[1][0].url).exists()


def test_download_is_a_tar_of_all_of_it(ask: Ask, job: tuple[str, list[CheckpointRecord]]) -> None:
    answer = ask("GET", "/20/download")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        names = [Path(name).name for name in tar.getnames()]
        assert names == ["manifest.json", "shared-0.safetensors"]
        contents = [file.read() for member in tar.getmembers() if (file := tar.extractfile(member)) is not None]
    assert json.loads(contents[0])["manifest"]["step"] == 20
    assert load(contents[1])["shared/w"].tolist() == (np.arange(70_000) + 20).tolist()
    assert len(answer.content) % tarfile.RECORDSIZE == 0


def test_a_download_of_damaged_bytes_breaks_off(ask: Ask, job: tuple[str, list[CheckpointRecord]]) -> None:
    change_a_byte(job[1][1].url)
    with pytest.raises(httpx.RemoteProtocolError):
        ask("GET", "/20/download")
    (Path(job[1][1].url) / "manifest.json").write_text("{")
    refused = ask("GET", "/20/download")
    assert (refused.status_code, refused.json()["code"]) == (409, "checkpoint_damaged")


@pytest.mark.parametrize(("method", "rest"), [("POST", "/99/verify"), ("POST", "/99/pin"), ("GET", "/99/download")])
def test_a_step_without_checkpoint(ask: Ask, method: str, rest: str) -> None:
    answer = ask(method, rest)
    assert (answer.status_code, answer.json()["code"]) == (404, "checkpoint_not_found")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["checkpoints", *arguments])


def test_the_command(job: tuple[str, list[CheckpointRecord]], tmp_path: Path) -> None:
    name, records = job
    assert "not read back yet" in run(name).stdout
    assert run("verify", name, "20").stdout.startswith("step 20: verified ")
    change_a_byte(records[0].url)
    damaged = run("verify", name, "10")
    assert (damaged.exit_code, damaged.stdout[:21]) == (1, "step 10: damaged: sha"[:21])
    assert run("pin", name, "20").stdout.endswith(", pinned\n")
    assert json.loads(run("unpin", name, "20", "--json").stdout)["pinned"] is False
    target = tmp_path / "c.tar"
    assert run("download", name, "20", "-o", str(target)).exit_code == 0
    assert tarfile.is_tarfile(target)
    assert run("download", name, "20", "-o", str(tmp_path)).exit_code == 0  # into a folder
    assert tarfile.is_tarfile(tmp_path / f"{name}-step-20.tar")
    assert run("download", name, "10", "-o", str(tmp_path / "d.tar")).exit_code != 0
    assert not list(tmp_path.glob("*d.tar*"))
    for wrong in (("drop", name, "20"), ("verify", name), ("verify", name, "x")):
        assert run(*wrong).exit_code == 2


@pytest.mark.parametrize(("finite", "said"), [(True, "not read back yet"), (False, "not read back yet, metrics not finite")])
def test_the_list_tells_of_metrics_that_were_not_finite(finite: bool, said: str) -> None:
    assert known_of({"problem": None, "verified_at": None, "finite": finite}) == said
