"""The loop: see -> decide -> save -> do.

Invariants: only the server that holds the lease sees, saves or does anything; nothing is done that was not saved before; a step that finds
another version is dropped and decided anew; one bad job, one failing call or a slow one stops nobody else; a pass may end anywhere (a
crash) and the next one goes on from what is saved and seen.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.core.actions import JobStep, Plan
from orchestrator.core.group_spec import Roots
from orchestrator.core.model import Job, World
from orchestrator.core.plan import plan
from orchestrator.core.states import AttemptState, JobState
from orchestrator.executor import Executor, Submit
from orchestrator.leadership import Leadership
from orchestrator.observer import Observer
from orchestrator.ports import Clock, Conflict, Groups, LeaseLost, Nodes, Store, Unavailable

_log = logging.getLogger(__name__)

SOON_S = 0.02  # something moved: what follows from it shall not wait
UNSETTLED_S = 0.25  # a group is being made, mended or ended
SETTLED_S = 1.0  # groups train
IDLE_S = 5.0  # nothing to watch but the queue
FOLLOW_S = 5.0  # another server leads; whoever gets the lease wakes its loop
DATABASE_S = 1.0  # after a pass that the database refused
THREADS = 16  # half of the calls that the way to Ray has room for, so that looking is never shut out by doing


@dataclass(frozen=True)
class Work:
    """What a reconciler has done since its start. ``refused``: passes that ended because the database did not answer; ``leads``: it holds
    the lease now; ``leases_lost``: how often another server took it."""

    passes: int
    seconds: float
    refused: int
    errors: int
    last_pass_at: float | None
    leads: bool
    leases_lost: int


class Reconciler:
    """``wake`` may be set by anyone to have the next pass at once."""

    def __init__(
        self,
        store: Store,
        groups: Groups,
        nodes: Nodes,
        clock: Clock,
        roots: Roots,
        wake: threading.Event,
        lease: Leadership,
        submit: Submit | None = None,
    ) -> None:
        self._store, self._clock, self._roots, self._wake, self._lease = store, clock, roots, wake, lease
        self._pool = ThreadPoolExecutor(THREADS, "keepstep-do")  # starts no thread before it is used
        self._observer = Observer(store, groups, nodes)
        self._executor = Executor(groups, lease.require, submit or self._pool.submit, wake)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._errors = 0
        self._passes, self._seconds, self._refused = 0, 0.0, 0
        self.last_pass_at: float | None = None  # Unix seconds: when the newest pass had saved all that it decided

    @property
    def errors(self) -> int:
        """Steps and actions that failed in a way that nobody foresaw, since the start."""
        return self._errors + self._executor.errors

    @property
    def work(self) -> Work:
        leads = self._lease.fence is not None
        return Work(self._passes, self._seconds, self._refused, self.errors, self.last_pass_at, leads, self._lease.lost)

    def start(self) -> None:
        """Runs passes in a thread until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="keepstep-reconciler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends after the pass under way; jobs go on."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def once(self) -> float:
        """One pass, where this server leads; returns how many seconds the next may wait. Raises Unavailable when the database does not
        answer."""
        fence = self._lease.fence
        if fence is None:
            return FOLLOW_S
        self._lease.pass_begins()
        began = time.perf_counter()
        try:
            pause = self._pass(fence)
            self._passes += 1
            self._seconds += time.perf_counter() - began
        except LeaseLost as error:
            _log.warning("pass not finished: %s", error)
            self._lease.drop(fence)
            pause = FOLLOW_S
        finally:
            self._lease.pass_ends(self.last_pass_at)
        return pause

    def _pass(self, fence: int) -> float:
        world = self._observer.world(fence, *self._executor.collect())
        now = self._clock.now()
        decided = plan(world, now, self._roots)
        for job_id, error in decided.broken.items():
            self._errors += 1
            _log.error("job %s: no decision is possible, it is left alone: %s", job_id, error)
        done, conflicts = self._save(decided, fence)
        self.last_pass_at = self._clock.now()
        self._executor.start([*(action for step in done for action in step.actions), *decided.sweep])
        before = {job.id: job for job in world.jobs}
        if conflicts or any(_moved(step, before[step.job.id], world) for step in done):
            return SOON_S
        return _patience(decided, now)

    def _save(self, decided: Plan, fence: int) -> tuple[list[JobStep], int]:
        """The steps whose actions may be done, and how many found another version."""
        done, conflicts = [], 0
        for step in decided.steps:
            try:
                if step.changed and not step.told_only:
                    self._store.save_step(step, fence)
                done.append(step)
            except Conflict:
                conflicts += 1
            except (Unavailable, LeaseLost):
                raise
            except Exception:
                self._errors += 1
                _log.exception("job %s: its step cannot be saved; it is left alone until the next pass", step.job.id)
        # A queue moves as a whole: a thousand transactions would hold up what follows from this pass.
        self._store.save_told([step.job for step in done if step.told_only], fence)
        return done, conflicts

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            computed = time.thread_time()
            try:
                pause = self.once()
            except Unavailable as error:
                self._refused += 1
                _log.warning("pass not finished: %s", error)
                pause = DATABASE_S
            except Exception:
                self._errors += 1
                _log.exception("pass failed")
                pause = DATABASE_S
            # It rests as long as it computed, whoever wakes it: answers share the interpreter with it.
            if self._stopping.wait(min(time.thread_time() - computed, SETTLED_S)):
                return
            self._wake.wait(pause)


def _moved(step: JobStep, before: Job, world: World) -> bool:
    """True when what was saved has consequences that the next pass should see to at once."""
    if not step.changed:
        return False
    old = world.attempts.get(step.job.id)
    return before.state is not step.job.state or (step.attempt is not None and (old is None or old.state is not step.attempt.state))


def _patience(decided: Plan, now: float) -> float:
    live = [step for step in decided.steps if step.attempt is not None and step.attempt.state is not AttemptState.ENDED]
    settled = all(step.job.state is JobState.RUNNING and step.attempt and step.attempt.state is AttemptState.ACTIVE for step in live)
    pause = IDLE_S if not live else SETTLED_S if settled else UNSETTLED_S
    waiting = any(step.job.state is JobState.PENDING for step in decided.steps)
    pause = min(pause, SETTLED_S) if waiting else pause
    return pause if decided.look_again_at is None else max(SOON_S, min(pause, decided.look_again_at - now))
