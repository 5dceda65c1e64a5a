"""Ranks and nothing else: processes with the environment that torchrun would give them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from systems.system import SCRIPTS, Job, Service, environment, free_port, program


@dataclass(frozen=True)
class Bare:
    name: str
    script: str
    env: Mapping[str, str]

    @contextmanager
    def up(self, folder: Path) -> Iterator[Service]:
        """Nothing has to run before."""
        yield self

    @contextmanager
    def submit(self, folder: Path, ranks: int) -> Iterator[Job]:
        env = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "BENCH_FOLDER": str(folder), **self.env}
        at = time.time()
        with ExitStack() as stack:
            output = stack.enter_context((folder / "output").open("w"))
            for rank in range(ranks):
                stack.enter_context(program(str(SCRIPTS / self.script), env=env | {"RANK": str(rank)}, output=output))
            yield Job(folder, ranks, at)
