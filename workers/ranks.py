"""The rank processes of one node: forks through the launcher, exits, boards, and what is known of each rank.

Invariants: at most one generation lives at a time; a rank that we signalled is marked as ours before the signal is sent; ``stop`` returns
only when no process of any rank lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workers.board import Board
from workers.checkpoint.admission import REASON, notes
from workers.checkpoint.trial import TRIAL_ANSWER, RestoreTrial, clear, read_answer
from workers.disks import full
from workers.drills import inject, remove_cgroup
from workers.environ import launcher_environment, rank_environment
from workers.link import Link
from workers.logs import LogPump, log_name
from workers.messages import ErrorReport, GroupSpec, LaunchOrder, RankReport, RankState
from workers.ports import ReservedPort
from workers.processes import end_group, end_orphans, os_state
from workers.rank import parse_python
from workers.reports import from_board, urgent
from workers.signs import Signs
from workers.workdir import local_path, saved_folder

STOP_S = 10.0  # a launcher that has not ended its ranks by then never will
LOGS_S = 5.0  # at the end, for storage to take the last output
EARLY_DEATHS = 3


@dataclass
class _Rank:
    report: RankReport
    await_step: int
    board: Board | None = None
    signs: Signs = field(default_factory=Signs)


class Ranks:
    """``changed`` is called after every change that the coordinator must hear of at once."""

    def __init__(
        self, spec: GroupSpec, index: int, shm: Path, tmp: Path, logs: Path, changed: Callable[[], None], interface: str | None
    ) -> None:
        self.spec, self.index, self.shm, self.tmp, self.logs = spec, index, shm, tmp, logs
        self.numbers = tuple(range(index * spec.processes_per_node, (index + 1) * spec.processes_per_node))
        self.generation = spec.first_generation - 1
        self.ready = False
        self.problem: str | None = None
        self.notes: list[tuple[int, str, str]] = []  # (rank, reason, sentence)
        self._told: frozenset[int] = frozenset()  # notes on too little memory that were passed on
        self._changed = changed
        self._interface = interface
        self._ranks: dict[int, _Rank] = {}
        self._pump = LogPump(lambda rank, text: self.notes.append((rank, "LogProblem", text)))
        self._link = Link(self._heard, self._launcher_ended)
        self._early_deaths = 0  # of launchers that were never ready
        self._untouched = True  # this launcher has made no rank, so it has nothing to stop
        self._drill_cgroup: Path | None = None  # of the newest oom drill
        self.drilled: str | None = None  # a drill that will end the whole agent
        self._stores: dict[int, asyncio.Future[int]] = {}
        self._met_here = False  # the ranks of this generation meet at a store of this launcher
        self._killed: dict[int, asyncio.Future[list[int]]] = {}
        self._trial: asyncio.Future[int] | None = None
        self.port = ReservedPort()
        self.own: frozenset[int] | None = None  # children of this process that are not below a launcher; None: it adopts no orphans

    # the launcher

    def start_launcher(self, cwd: Path) -> None:
        """Start the warm interpreter; ``ready`` follows when it has imported the framework. Raises OSError."""
        command = {"framework": self.spec.framework, "command": list(self.spec.command), "cwd": str(cwd), "shm": str(self.shm)}
        env = launcher_environment(os.environ, self.spec, self.index, self._interface, str(self.tmp))
        self._link.start(self.shm / "launcher.json", command, env, self.shm / "launcher.err")
        self._untouched = True
        self.saved = str(saved_folder(cwd))
        checkpoints, temporary = local_path(self.spec.storage_url), self.spec.env.get("TMPDIR") or str(self.tmp)
        self._folders = [str(cwd), self.saved, *([str(checkpoints)] if checkpoints else []), temporary, str(self.shm)]

    def _heard(self, message: dict[str, Any]) -> None:
        getattr(self, f"_on_{message.pop('op')}")(**message)

    def _launcher_ended(self, code: int) -> None:
        """The launcher takes its ranks with it (they die with their parent); a new one is started by the agent."""
        self._count_early_death(code)
        self.ready = False
        self._end_all()
        for number, rank in self._ranks.items():
            if rank.report.ended_at is None:
                rank.report = replace(rank.report, launcher_lost=not rank.report.ours)
                self._on_exited(number, rank.report.pid or 0, time.time(), -signal.SIGKILL)
        waiting: list[asyncio.Future[Any]] = [*self._stores.values(), *self._killed.values()]
        self._on_trial_ended(-signal.SIGKILL)
        for future in waiting:
            future.cancel()
        self._stores.clear()
        self._killed.clear()
        self._changed()

    def _count_early_death(self, code: int) -> None:
        """A launcher that can never start must not be tried for ever: its environment, or the framework, is broken."""
        self._early_deaths = 0 if self.ready else self._early_deaths + 1
        if self._early_deaths >= EARLY_DEATHS and self.problem is None:
            said = (self.shm / "launcher.err").read_text(errors="replace").strip()[-500:]
            self.problem = (
                f"its launcher ended {self._early_deaths} times before it was ready, last with {code}: {said or 'it said nothing'}"
            )

    @property
    def launcher_lives(self) -> bool:
        return self._link.lives

    @property
    def launcher_pid(self) -> int | None:
        """Of the newest one."""
        return self._link.process.pid if self._link.process is not None else None

    def _on_ready(self, seconds: float, problem: str | None) -> None:
        self.ready, self.problem = problem is None, problem
        self._changed()

    def _on_forked(self, rank: int, generation: int, pid: int) -> None:
        known = self._ranks.get(rank)
        if known is not None and known.report.generation == generation:
            known.report = replace(known.report, pid=pid)
            self._end_without_store()
            self._changed()

    def _on_store(self, generation: int, port: int) -> None:
        future = self._stores.get(generation)
        if future is not None and not future.done():
            if port:
                future.set_result(port)
            else:
                self._on_store_ended(generation)

    def _on_store_ended(self, generation: int) -> None:
        """Its port is dead: the next who asks gets a new store."""
        future = self._stores.pop(generation, None)
        if future is not None and not future.done():
            future.set_exception(ConnectionError("the store ended before it listened"))
        self._end_without_store()

    def _end_without_store(self) -> None:
        """Ranks that have not met yet would wait for a store that is gone until ``start_s`` is over. One that ends ends all."""
        if not self._met_here or self.generation in self._stores:
            return
        for number, pid in self.pids().items():
            report = self._ranks[number].report
            if report.first_step_at is None and not report.ours:
                self._met_here = False
                self.notes.append((number, "StoreLost", f"the store at which the ranks of generation {self.generation} meet has ended"))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return

    def _on_killed(self, generation: int, stuck: list[int]) -> None:
        future = self._killed.pop(generation, None)
        if future is not None and not future.done():
            future.set_result(stuck)

    def _on_trial_ended(self, code: int) -> None:
        if self._trial is not None and not self._trial.done():
            self._trial.set_result(code)

    def _on_exited(self, rank: int, pid: int, at: float, code: int) -> None:
        known = self._ranks.get(rank)
        if known is None or (known.report.pid not in (None, pid)):
            return
        self._read_board(known)
        tail = self._pump.drain(rank)
        known.report = replace(
            known.report,
            state=RankState.EXITED,
            ended_at=at,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            error=self._error(rank),
            tail=tail if code != 0 else tail[-1000:],
            os_state=None,
            oom_killed=known.signs.oom_killed() if code != 0 else None,
            disk_full=known.report.disk_full or (full(self._folders) if code > 0 and not known.report.ours else None),
        )
        remove_cgroup(self._drill_cgroup)
        self._changed()

    def _error(self, rank: int) -> ErrorReport | None:
        try:
            told: dict[str, Any] = json.loads((self.shm / f"error-{rank}.json").read_text())
            return ErrorReport(**{name: _readable(value) for name, value in told.items()})
        except (OSError, ValueError, TypeError):
            return None

    # generations

    async def open_store(self, generation: int, host: str) -> int:
        """Port of the generation's rendezvous store; it listens when this returns."""
        if generation not in self._stores:
            self._link.say(op="store", generation=generation, host=host)
            self._stores[generation] = asyncio.get_running_loop().create_future()
        return await asyncio.wait_for(asyncio.shield(self._stores[generation]), 10)

    def launch(self, order: LaunchOrder, staged: str | None) -> None:
        """Fork the ranks of a generation; their pids follow. Raises ConnectionError when the launcher is gone."""
        self.generation, self._met_here, self._untouched = order.generation, order.agent_store and self.index == 0, False
        for local_rank, number in enumerate(self.numbers):
            (self.shm / f"error-{number}.json").unlink(missing_ok=True)
            (self.shm / f"board-{number}").unlink(missing_ok=True)
            report = RankReport(
                number, self.index, self.spec.nodes[self.index].node_id, local_rank, order.generation, None, RankState.LAUNCHED
            )
            self._ranks[number] = _Rank(replace(report, started_at=time.time()), order.await_step)
            log = self._pump.open(number, self.logs / log_name(self.spec.attempt, order.generation, number))
            env = rank_environment(self.spec, self.index, local_rank, order, str(self.shm), self.saved, staged)
            try:
                self._link.say((log,), op="rank", rank=number, generation=order.generation, env=env)
            finally:
                os.close(log)

    async def stop(self, generation: int) -> list[int]:
        """SIGKILL to every process of every rank; returns pids that would not go (kernel has them)."""
        for rank in self._ranks.values():
            if rank.report.ended_at is None:
                rank.report = replace(rank.report, ours=True)
        if not self.launcher_lives or self._untouched:
            return []  # a launcher that still imports would not hear of it for seconds
        if generation not in self._killed:
            self._killed[generation] = asyncio.get_running_loop().create_future()
            self._link.say(op="kill", generation=generation)
        try:
            stuck = await asyncio.wait_for(asyncio.shield(self._killed[generation]), STOP_S)
        except TimeoutError:
            return await self._link.kill(STOP_S)
        except asyncio.CancelledError:  # it ended, and its ranks with it
            return []
        for number in self.numbers:
            self._pump.close(number)
        self._stores.pop(generation, None)
        return stuck

    async def try_restore(self, url: str, step: int) -> RestoreTrial | None:
        """Fork a child that reads a checkpoint back; see checkpoint.trial. One at a time."""
        if self._trial is not None and not self._trial.done():
            return None
        answer = self.shm / TRIAL_ANSWER
        answer.unlink(missing_ok=True)
        self._trial = asyncio.get_running_loop().create_future()
        self._link.say(op="trial", url=url, step=step, ranks=list(self.numbers), world_size=self.spec.world_size)
        try:
            await self._trial
            return read_answer(answer)
        finally:
            clear(self.shm)

    def terminate(self) -> None:
        """SIGTERM to the main process of each rank that lives, once."""
        for rank in self._ranks.values():
            pid = rank.report.pid
            if rank.report.ended_at is None and pid is not None and not rank.report.ours:
                rank.report = replace(rank.report, ours=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def drill(self, fault: str, number: int) -> str:
        """Inject a fault into a rank. Raises ValueError when it does not run, or the fault would not work."""
        rank = self._ranks.get(number)
        pid = rank.report.pid if rank is not None and rank.report.ended_at is None else None
        if rank is None or pid is None:
            raise ValueError(f"rank {number} does not run now")
        before = rank.report
        rank.report = replace(before, drill=fault)  # known before its end can be heard of
        python = parse_python(list(self.spec.command)) is not None
        try:
            done, cgroup = inject(fault, pid, python, found=before.attached or self.spec.silence_s is not None)
        except (ValueError, OSError):
            rank.report = before
            raise
        self._drill_cgroup = cgroup or self._drill_cgroup
        return f"rank {number}: {done}"

    # observation

    @property
    def living(self) -> bool:
        return any(r.report.ended_at is None for r in self._ranks.values())

    @property
    def steady(self) -> bool:
        """All ranks have finished a new step and go on."""
        return all(r.report.new_step_at is not None and r.report.ended_at is None for r in self._ranks.values())

    @property
    def all_left(self) -> bool:
        """Every rank here has ended with 0."""
        return bool(self._ranks) and all(r.report.exit_code == 0 for r in self._ranks.values())

    def reports(self) -> tuple[RankReport, ...]:
        if self.drilled is not None:
            return tuple(replace(r.report, drill=self.drilled) for r in self._ranks.values())
        return tuple(r.report for r in self._ranks.values())

    def metrics(self) -> dict[str, float]:
        rank = self._ranks.get(0)
        with contextlib.suppress(ValueError):
            return rank.board.read().metrics if rank is not None and rank.board is not None else {}
        return {}

    def pids(self) -> dict[int, int]:
        """Process of each rank that lives."""
        return {n: r.report.pid for n, r in self._ranks.items() if r.report.ended_at is None and r.report.pid is not None}

    def silent(self) -> dict[int, float]:
        """Seconds since each rank was last seen to show a step or a phase."""
        return {number: rank.signs.silent_s for number, rank in self._ranks.items()}

    def quiet(self) -> dict[int, float]:
        """Seconds since each living rank last printed or used the CPU; empty where the job does not ask."""
        living = {n: r for n, r in self._ranks.items() if r.report.ended_at is None}
        return {n: r.signs.quiet_s for n, r in living.items()} if self.spec.silence_s is not None else {}

    def read_boards(self) -> None:
        """Bring the reports up to date; calls ``changed`` for what cannot wait for the next beat."""
        before = [urgent(r.report) for r in self._ranks.values()]
        for number, rank in self._ranks.items():
            if rank.report.ended_at is None:
                self._read_board(rank)
                if rank.report.pid is not None:
                    rank.signs.look(rank.report.pid, self._pump.progress(number), self.spec.silence_s is not None)
        degraded = notes(self.shm, self._told)
        self._told |= degraded.keys()
        self.notes += [(rank, REASON, text) for rank, text in degraded.values()]
        if degraded or before != [urgent(r.report) for r in self._ranks.values()]:
            self._changed()

    def request_checkpoint(self, step: int) -> None:
        for rank in self._ranks.values():
            if rank.board is not None:
                rank.board.checkpoint_request = step

    def _read_board(self, rank: _Rank) -> None:
        report = rank.report
        if rank.board is None:
            with contextlib.suppress(OSError, ValueError):
                rank.board = Board.open(self.shm / f"board-{report.rank}")
        if rank.board is None:
            return
        try:
            seen = rank.board.read()
        except ValueError:  # written over; a rank that shows nothing any more counts as silent
            return
        if seen.generation != report.generation:
            rank.board = None
            return
        rank.signs.show((seen.generation, seen.step, seen.phase, seen.phase_at, seen.restored_at, seen.attached, seen.failed_at))
        failed_now = seen.failed_at is not None and report.failed_at is None
        rank.report = replace(
            from_board(report, seen, rank.await_step),
            error=self._error(report.rank) if seen.failed_at else report.error,
            disk_full=full(self._folders) if failed_now else report.disk_full,
            os_state=os_state(report.pid) if report.pid and report.ended_at is None else None,
        )

    def close(self) -> list[int]:
        """End the launcher and everything below it; returns pids that would not go."""
        self._link.close()
        left = self._end_all()
        remove_cgroup(self._drill_cgroup)
        self.port.free()
        for number in self.numbers:
            self._pump.close(number)
        return left

    def _end_all(self) -> list[int]:
        """What a launcher that is gone has left; returns pids that would not go."""
        left = end_group(f"{self.spec.key}.{self.index}")
        if self.own is not None:
            end_orphans(self.own)
        return left

    def settle(self) -> None:
        """After ``close``: waits, at most LOGS_S seconds, until storage has the last output."""
        self._pump.settle(LOGS_S)


def _readable(value: Any) -> Any:
    """Text that every encoder takes: bytes of a file name that are no UTF-8 come as lone surrogates."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
