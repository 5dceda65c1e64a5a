"""torchrun: one agent for all ranks, c10d rendezvous, as many restarts as it needs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from systems.system import SCRIPTS, Job, Service, environment, free_port, program

# Without it the ranks of a restart share the store of those before, may read their addresses there, and then wait for the dead.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Torchrun:
    name = "torchrun"

    @contextmanager
    def up(self, folder: Path) -> Iterator[Service]:
        """Nothing has to run before."""
        yield self

    @contextmanager
    def submit(self, folder: Path, ranks: int) -> Iterator[Job]:
        command = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
        command += [f"--nproc-per-node={ranks}", "--max-restarts=100", str(SCRIPTS / "plain.py")]
        at = time.time()
        with (
            (folder / "output").open("w") as output,
            program(*command, env=environment() | OWN_STORE | {"BENCH_FOLDER": str(folder)}, output=output),
        ):
            yield Job(folder, ranks, at)
