"""The board: a small memory-mapped file through which a rank shows step, phase and time without a system call.

One writer (the rank; the agent writes only ``checkpoint_request``), any readers. Each field is one aligned 8-byte word, so a reader never
sees half a value; the metrics text carries a sequence number and is dropped by the reader when torn. The file outlives the rank, hence
the agent can still read the last step of a killed one.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from workers.messages import RankPhase

MAGIC = 0x4B53424F41524431  # "KSBOARD1"
SIZE = 8192
RING = 64  # newest finished steps with their times
MAX_STEP = 2**53 - 1  # a larger number is not the same in every JSON
unix_time = time.time  # taken now: a script that replaces it must not change what is told

_LATEST = 1e12  # Unix time
_PHASES = tuple(RankPhase)
_WORD = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_STEP = struct.Struct("<Qdd")  # step, when it was finished, seconds of announced phases before it
# Offsets of the words.
_AT_MAGIC, _AT_GENERATION, _AT_PID, _AT_PHASE, _AT_PHASE_AT = 0, 8, 16, 24, 32
_AT_STEP, _AT_RESTORED, _AT_RESTORED_AT, _AT_STARTED_AT, _AT_ATTACHED = 40, 56, 64, 72, 80
_AT_REQUEST, _AT_FIRST_STEP_AT, _AT_FAILED_AT, _AT_NONFINITE = 88, 96, 104, 112
_AT_RING = 128
_AT_METRICS = _AT_RING + RING * _STEP.size  # sequence, length, text
_METRICS_ROOM = SIZE - _AT_METRICS - 16


@dataclass(frozen=True)
class BoardView:
    """One reading. Times are Unix seconds; ``step`` is 0 before the first finished step, ``restored`` 0 where nothing was restored."""

    generation: int
    pid: int
    phase: RankPhase
    phase_at: float
    step: int
    step_at: float | None
    steps: tuple[tuple[int, float], ...]  # newest finished steps, oldest first
    gaps: tuple[float, ...]  # seconds from each of them to the next, without announced phases
    started_at: float
    first_step_at: float | None
    restored: int
    restored_at: float | None
    failed_at: float | None
    attached: bool  # the script called workers.start()
    metrics: dict[str, float]
    nonfinite: dict[str, int]  # metric -> first step of this generation at which it was NaN or infinite
    nonfinite_since: int  # first of at least three reports in a row, up to the newest, with such a metric; 0: there are none


class Board:
    """A mapped board file."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def create(cls, path: Path, generation: int, pid: int) -> Board:
        """A fresh board; replaces an older one by rename, so that a reader of the old file is not disturbed."""
        fresh = path.with_name(f"{path.name}.{pid}.new")
        with open(fresh, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE)  # a full /dev/shm is an error here, not a SIGBUS later
            board = cls(mmap.mmap(file.fileno(), SIZE))
        now = unix_time()
        for at, value in ((_AT_GENERATION, generation), (_AT_PID, pid), (_AT_PHASE, _PHASES.index(RankPhase.START))):
            board._put(at, value)
        for at in (_AT_PHASE_AT, _AT_STARTED_AT):
            board._put_time(at, now)
        board._put(_AT_MAGIC, MAGIC)
        os.replace(fresh, path)
        return board

    @classmethod
    def open(cls, path: Path) -> Board:
        """Map an existing board. Raises FileNotFoundError, or ValueError when it is not a board."""
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_size != SIZE:
                raise ValueError(f"{path} is not a board: wrong size")
            board = cls(mmap.mmap(file.fileno(), SIZE))
        if board._get(_AT_MAGIC) != MAGIC:
            raise ValueError(f"{path} is not a board: wrong mark")
        return board

    def close(self) -> None:
        self._memory.close()

    def attach(self) -> None:
        """The script reports its steps from now on."""
        self._put(_AT_ATTACHED, 1)

    def phase(self, phase: RankPhase) -> None:
        self._put_time(_AT_PHASE_AT, unix_time())
        self._put(_AT_PHASE, _PHASES.index(phase))

    def restored(self, step: int) -> None:
        """State of ``step`` is in place (0: started from nothing)."""
        self._put(_AT_RESTORED, step)
        self._put_time(_AT_RESTORED_AT, unix_time())

    def finish_step(self, step: int, at: float, phases_s: float = 0.0) -> None:
        """``step`` (counted from 1) was finished at Unix time ``at``; ``phases_s`` of the time since the step before were announced."""
        _STEP.pack_into(self._memory, _AT_RING + (step % RING) * _STEP.size, step, at, phases_s)
        if not self._get_time(_AT_FIRST_STEP_AT):
            self._put_time(_AT_FIRST_STEP_AT, at)
        self._put(_AT_STEP, step)

    def failed(self) -> None:
        """The script ended with an exception; the process is on its way out."""
        self._put_time(_AT_FAILED_AT, unix_time())

    def metrics(self, values: dict[str, float], nonfinite: dict[str, int] | None = None, since: int = 0) -> None:
        """Newest metrics, see BoardView; silently cut to what fits is worse than none, so too large a set raises ValueError."""
        text = json.dumps([values, nonfinite or {}], ensure_ascii=False).encode("utf-8", "replace")  # every encoder must take the names
        self._put(_AT_NONFINITE, since)
        if len(text) > _METRICS_ROOM:
            raise ValueError(f"metrics: {len(text)} bytes of JSON, the limit is {_METRICS_ROOM}; report fewer values")
        sequence = self._get(_AT_METRICS)
        self._put(_AT_METRICS, sequence + 1)  # odd: being written
        self._put(_AT_METRICS + 8, len(text))
        self._memory[_AT_METRICS + 16 : _AT_METRICS + 16 + len(text)] = text
        self._put(_AT_METRICS, sequence + 2)

    @property
    def checkpoint_request(self) -> int:
        """The step whose snapshot the agent wants pinned; 0: none."""
        return self._get(_AT_REQUEST)

    @checkpoint_request.setter
    def checkpoint_request(self, step: int) -> None:
        self._put(_AT_REQUEST, step)

    def read(self) -> BoardView:
        """Raises ValueError where it holds what no rank writes."""
        step = self._step(_AT_STEP)
        metrics, nonfinite = self._read_metrics()
        ring = [_STEP.unpack_from(self._memory, _AT_RING + i * _STEP.size) for i in range(RING)]
        found = sorted(entry for entry in ring if 0 < entry[0] <= step and 0 <= entry[1] < _LATEST)
        steps = tuple((s, at) for s, at, _ in found)
        return BoardView(
            generation=self._get(_AT_GENERATION),
            pid=self._get(_AT_PID),
            phase=self._phase(),
            phase_at=self._get_time(_AT_PHASE_AT),
            step=step,
            step_at=steps[-1][1] if steps else None,
            steps=steps,
            gaps=tuple(max(0.0, later[1] - earlier[1] - later[2]) for earlier, later in pairwise(found)),
            started_at=self._get_time(_AT_STARTED_AT),
            first_step_at=self._get_time(_AT_FIRST_STEP_AT) or None,
            restored=self._step(_AT_RESTORED),
            restored_at=self._get_time(_AT_RESTORED_AT) or None,
            failed_at=self._get_time(_AT_FAILED_AT) or None,
            attached=bool(self._get(_AT_ATTACHED)),
            metrics=metrics,
            nonfinite=nonfinite,
            nonfinite_since=self._step(_AT_NONFINITE),
        )

    def _phase(self) -> RankPhase:
        number = self._get(_AT_PHASE)
        if number >= len(_PHASES):
            raise ValueError(f"no phase has the number {number}")
        return _PHASES[number]

    def _step(self, at: int) -> int:
        step = self._get(at)
        if step > MAX_STEP:
            raise ValueError(f"{step} is no step")
        return step

    def _read_metrics(self) -> tuple[dict[str, float], dict[str, int]]:
        before = self._get(_AT_METRICS)
        length = self._get(_AT_METRICS + 8)
        if before % 2 or not 0 < length <= _METRICS_ROOM:
            return {}, {}
        text = bytes(self._memory[_AT_METRICS + 16 : _AT_METRICS + 16 + length])
        if self._get(_AT_METRICS) != before:
            return {}, {}
        values, nonfinite = json.loads(text)
        return values, nonfinite

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._memory, at, value)

    def _get(self, at: int) -> int:
        value: int = _WORD.unpack_from(self._memory, at)[0]
        return value

    def _put_time(self, at: int, value: float) -> None:
        _TIME.pack_into(self._memory, at, value)

    def _get_time(self, at: int) -> float:
        value: float = _TIME.unpack_from(self._memory, at)[0]
        if not 0 <= value < _LATEST:
            raise ValueError(f"{value} is no time")
        return value
