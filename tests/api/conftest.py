"""A real server on a real port over a real SQLite store, with no cluster behind it: jobs are accepted and wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from api.app import create_app
from api.serve import context_of
from orchestrator.adapters.db.engine import open_engine
from orchestrator.adapters.db.leases import SqlLeases
from orchestrator.adapters.db.schema import upgrade
from orchestrator.adapters.db.store import SqlStore
from orchestrator.bootstrap import Control, assemble
from orchestrator.clock import SystemClock
from orchestrator.core.model import GroupView, Node
from orchestrator.ports import Unavailable
from workers.messages import GroupSpec

TOKEN = "test-token-of-enough-length"


class NoCluster:
    """The Groups and Nodes ports while Ray does not answer, which is a state that every server must live with."""

    def observe(self, keys: Sequence[tuple[str, int]], fence: int | None) -> dict[tuple[str, int], GroupView]:
        raise Unavailable("ray: nothing answers")

    def create(self, spec: GroupSpec, fence: int) -> None:
        raise Unavailable("ray: nothing answers")

    def end(self, job_id: str, attempt: int, grace_s: float, fence: int) -> None:
        raise Unavailable("ray: nothing answers")

    def remove(self, job_id: str, attempt: int, fence: int) -> bool:
        raise Unavailable("ray: nothing answers")

    def drill(self, job_id: str, attempt: int, fault: str, rank: int) -> str:
        raise Unavailable("ray: nothing answers")

    def existing(self) -> set[tuple[str, int]]:
        raise Unavailable("ray: nothing answers")

    def nodes(self) -> tuple[Node, ...]:
        raise Unavailable("ray: nothing answers")


@dataclass(frozen=True)
class Running:
    """A server that answers at ``address``, and what is inside of it."""

    address: str
    control: Control
    http: httpx.Client
    state_dir: Path

    def spec(self, **fields: Any) -> dict[str, Any]:
        return {"name": "a job", "framework": "plain", "command": ["true"], **fields}

    def submit(self, **fields: Any) -> dict[str, Any]:
        answer = self.http.post("/api/v1/jobs", json=self.spec(**fields))
        assert answer.status_code == 201, answer.text
        return dict(answer.json())


class _Thread(uvicorn.Server):
    """A server in a thread: signals belong to the main thread."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    def run_here(self) -> None:
        asyncio.run(self.serve())

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    engine = open_engine(f"sqlite:///{tmp_path / 'keepstep.db'}")
    upgrade(engine)
    store = SqlStore(engine)
    nowhere = NoCluster()
    control = assemble(
        store, nowhere, nowhere, SystemClock(), str(tmp_path / "storage"), threading.Event(), SqlLeases(engine), "none", sole=True
    )
    control.leadership.beat()
    config = uvicorn.Config(create_app(context_of(control), TOKEN), port=0, log_config=None, timeout_graceful_shutdown=1)
    running = _Thread(config)
    thread = threading.Thread(target=running.run_here)
    thread.start()
    assert running.up.wait(20)
    address = f"http://127.0.0.1:{running.port}"
    monkeypatch.setenv("KEEPSTEP_SERVER", address)
    monkeypatch.setenv("KEEPSTEP_TOKEN", TOKEN)
    monkeypatch.setenv("KEEPSTEP_STATE_DIR", str(tmp_path))
    with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=30) as http:
        yield Running(address, control, http, tmp_path)
    running.should_exit = True
    thread.join(20)
    store.close()
