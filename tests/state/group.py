"""Starts real ranks as an agent would: shared memory, boards, environment, and a store that outlives the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.board import Board

PROGRAMS = Path(__file__).parent / "programs"
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("KEEPSTEP_")}
QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def alone(program: str, *args: str, cwd: Path) -> dict[str, str]:
    """Run the program without any launcher; its lines by step, see ``lines``."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *args],
        env=CLEAN | QUIET,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return lines(done.stdout)


def lines(text: str) -> dict[str, str]:
    """First word of each line -> the rest: step=7 -> loss=..., weights=... -> random=..."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if "=" in line}


class Group:
    """The ranks of one node."""

    def __init__(self, shm: Path, world_size: int, **variables: str) -> None:
        self.shm, self.world_size, self.variables = shm, world_size, variables
        self.generation = -1
        self.processes: list[subprocess.Popen[str]] = []
        self._store: Any = None

    def start(self, program: str, *args: str, restore: dict[str, Any] | None = None) -> None:
        self.generation += 1
        env = CLEAN | QUIET | {"TMPDIR": str(self.shm)} | self.variables
        if self.world_size > 1:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            env |= {"TORCHELASTIC_RESTART_COUNT": str(self.generation)}
        self.processes = []
        for rank in range(self.world_size):
            places = {"RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.world_size}
            mine = {f"KEEPSTEP_{name}": str(value) for name, value in places.items()}
            if self.world_size > 1:
                mine |= {name: str(value) for name, value in places.items()}
            mine |= {
                "KEEPSTEP_SNAPSHOT_EVERY": "1",
                "KEEPSTEP_SHM": str(self.shm),
                "KEEPSTEP_GENERATION": str(self.generation),
                "KEEPSTEP_RESTORE": json.dumps(restore),
            }
            Board.create(self.shm / f"board-{rank}", self.generation, 0)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAMS / program), *args],
                    env=mine | env, cwd=self.shm, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip

    def wait(self, expected: Sequence[int]) -> list[dict[str, str]]:
        """The lines of each rank; asserts the exit codes. A rank that outlives another's death is killed, as an agent would."""
        outputs = []
        for process, code in zip(self.processes, expected, strict=True):
            out, err = process.communicate(timeout=120)
            assert process.returncode == code, f"{process.returncode} instead of {code}: {err[-3000:]}"
            outputs.append(lines(out))
        return outputs

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
