"""Checkpoints in an object store: a real S3 server on this machine, reached as a user's would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.workers.make import spec
from workers.checkpoint.archive import archive
from workers.checkpoint.catalog import catalog, pin, remove, stage, unpin, verify
from workers.checkpoint.damage import change_a_byte
from workers.checkpoint.lease import Fenced, Lease, claim
from workers.checkpoint.reader import read_staged
from workers.checkpoint.snapshot import Place, SnapshotWriter
from workers.checkpoint.writer import commit, write_share
from workers.listing import read_catalog

server = pytest.importorskip("moto.server", reason="needs moto[server]")
pytest.importorskip("s3fs", reason="needs keepstep[s3]")


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(endpoint_url=f"http://{host}:{port}").mkdir("bucket")
    yield "s3://bucket/jobs/job-x"
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


def save(shm: Path, url: str, writer: SnapshotWriter, step: int) -> str:
    writer.write(step, {"w": np.arange(3_000_000) + step}, {"parts": {"sample": step}}, pin=False)
    share = write_share(shm, url, step, 1, 0, 0, 1, [0])
    return commit(url, "job-x", 1, 0, step, 1, [share], 1.0, 2.0).url


def test_a_checkpoint_round_trips(shm: Path, url: str) -> None:
    claim(url, Lease("job-x", 1, 0))
    writer = SnapshotWriter(shm, Place(0, 1, 0, 1, 0), 0)
    first, second = save(shm, url, writer, 10), save(shm, url, writer, 20)
    assert [(c.url, c.step, c.problem) for c in catalog(url)] == [(second, 20, None), (first, 10, None)]
    assert verify(second) is None
    size, chunks = archive(second)
    assert sum(map(len, chunks)) == size
    assert pin(first)
    assert not remove(first)
    unpin(first)
    change_a_byte(second)
    assert "does not match its checksum" in str(verify(second))
    assert "does not match its checksum" in str(stage(second, shm, "staged", [0], 1))
    assert stage(first, shm, "staged", [0], 1) is None
    found = read_staged(shm / "staged", 0, 1)
    assert found.shared["w"].tobytes() == (np.arange(3_000_000) + 10).tobytes()
    assert found.own == {"parts": {"sample": 10}}
    assert remove(first)
    assert [c.step for c in read_catalog(spec(1, storage_url=url, attempt=2, job_id="job-x"), 3)[0]] == [20]
    with pytest.raises(Fenced, match="was replaced by attempt 2, generation 3"):
        save(shm, url, writer, 30)
