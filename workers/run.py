"""What user code holds: ``start``, ``restore``, ``step``, ``should_stop``.

``start`` joins the group, ``restore`` puts the freshest state in place, ``step`` says that one more step is finished. Invariants: a step
counts from 1 and goes on after a restore; a snapshot holds the state as it was when a step was finished, and is taken inside ``step`` or
at a normal end that follows on one; without a launcher everything works alone and leaves nothing behind. A failing snapshot never ends
training, a leaf that cannot be saved does, at the first one. A child that the script forks holds nothing of the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

from workers.agreement import LAG, Agreement
from workers.board import MAX_STEP, Board, unix_time
from workers.checkpoint.admission import leave_note, sentence
from workers.checkpoint.cadence import Cadence, decision_at
from workers.checkpoint.elastic import CONSENT, adapt
from workers.checkpoint.reader import Restored, read_snapshot, read_staged
from workers.checkpoint.slots import SLOTS
from workers.checkpoint.snapshot import SnapshotWriter
from workers.checkpoint.tree import StateError, StateGone
from workers.environment import Environment, read_environment
from workers.frameworks.adapters import Counter, Framework, adapter
from workers.frameworks.plain import is_generator
from workers.messages import RankPhase, Source

_RESERVED = ("step", "source")
PERSISTENT = 3  # reports in a row with a metric that is not finite


class Run:
    """One rank's hold on its job; made by ``start``.

    ``rank``, ``world_size``, ``local_rank`` count as in torchrun; ``device`` is a torch.device or None; ``strategy`` a tf.distribute
    strategy or None; ``steps`` is the number of finished steps, those of earlier generations included.
    """

    def __init__(self, environment: Environment, framework: Framework) -> None:
        place = environment.place
        self.rank, self.world_size, self.local_rank = place.rank, place.world_size, place.local_rank
        self.device, self.strategy = framework.device, framework.strategy
        self.steps = 0
        self._environment = environment
        self._framework = framework
        self._board = Board.open(environment.shm / f"board-{place.rank}") if environment.shm else None
        self._agreement = Agreement(framework.store, place.rank, place.world_size)
        self._cadence = Cadence(environment.snapshot_every, agreed=self._agreement.common)
        self._sought: int | None = None  # the step of a decision that was not found yet
        self._parts: dict[str, Any] | None = None
        self._elastic = False
        self._counters: list[Counter] = []
        self._writer: SnapshotWriter | None = None
        self._slots = SLOTS  # that memory had room for when it was last told
        self._phase = RankPhase.START
        self._owed = False  # a snapshot was due while the ranks were adrift
        self._step_ended: float | None = None
        self._step_seconds = 0.0
        self._nonfinite: dict[str, int] = {}  # metric -> first step of this generation at which it was not finite
        self._nonfinite_since = 0  # as on the board
        self._bad_reports: tuple[int, ...] = ()  # steps of the newest reports in a row with such a metric, the first ones
        self._phases_s = 0.0  # of announced phases since the last step
        self._told_to_stop = False
        self._answered = False  # the script was told so by should_stop
        self._failed = False
        if self._board:
            self._board.attach()

    @property
    def restored(self) -> bool:
        """``restore`` was called."""
        return self._parts is not None

    @property
    def parts(self) -> dict[str, Any]:
        """What was named in ``restore``; empty before."""
        return dict(self._parts or {})

    # -- state

    def restore(self, *, elastic: bool = False, **parts: Any) -> SimpleNamespace:
        """Name the parts of the training state and put the freshest valid state into them, bit for bit.

        A part is anything with ``state_dict``/``load_state_dict``, a Keras model, a random generator, or a tree of arrays (returned, as it
        cannot be changed in place: pass the new one to ``step`` each time). Call it once, after everything is made and before the first
        step. Returns an object with ``step`` (0: nothing was restored), ``source`` and one attribute per part. ``elastic`` agrees that
        another number of ranks takes over what this one saves, and the other way round. Raises StateError.
        """
        if self._parts is not None:
            raise StateError("restore: called twice; name all parts in one call")
        if self.steps:
            raise StateError(f"restore: {self.steps} steps are finished already; call it before the first step")
        if not isinstance(elastic, bool):
            raise StateError("restore: elastic is a choice, True or False; choose another name for the part")
        clash = sorted(set(parts) & set(_RESERVED))
        if clash:
            raise StateError(f"restore: a part cannot be named {clash[0]!r}; choose another name")
        self._framework.begin(parts)
        begin, source = self._environment.restore, Source.NONE
        with self.phase(RankPhase.RESTORE):
            if begin is not None:
                try:
                    state = self._read(begin.staged)
                except (StateError, OSError) as error:
                    raise StateGone(f"restore: the state of step {begin.step} cannot be read: {error}") from error
                derive: tuple[str, ...] = ()
                if state.ranks:
                    state, derive = self._adapted(state, parts, elastic)
                _check_parts(parts, state)
                parts = self._framework.apply(parts, state.shared, state.own)
                self._framework.derive(derive, parts, self.rank)
                self.steps, source = state.step, Source(begin.source)
            self._parts, self._elastic = parts, elastic
            known = (self._framework, *parts.values())
            self._counters = [part for part in known if hasattr(part, "step_finished") and hasattr(part, "moved")]
            if self._environment.shm:
                self._writer = SnapshotWriter(self._environment.shm, self._environment.place, self.steps)
        if self._board:
            self._board.restored(self.steps)
        self._step_ended = time.perf_counter()
        return SimpleNamespace(step=self.steps, source=str(source), **parts)

    def _read(self, staged: str | None) -> Restored:
        environment = self._environment
        assert environment.shm is not None
        assert environment.restore is not None
        if staged is not None:
            return read_staged(environment.shm / staged, self.rank, self.world_size)
        first = self.rank - self.local_rank
        local_ranks = range(first, first + environment.place.local_world_size)
        return read_snapshot(environment.shm, self.rank, local_ranks, environment.restore.step)

    def _adapted(self, state: Restored, parts: dict[str, Any], elastic: bool) -> tuple[Restored, tuple[str, ...]]:
        """(the state for this rank, random generators to derive) where another number of ranks saved it."""
        before = len(state.ranks)
        if not elastic:
            raise StateError(
                f"restore: {before} ranks saved the state of step {state.step} and this group has {self.world_size}; "
                f"run it with {before} ranks, or say run.restore(..., elastic=True)"
            )
        try:
            adapted = adapt(state.ranks, self.rank, [name for name, part in parts.items() if is_generator(part)])
        except StateError as error:
            raise StateError(f"restore: step {state.step}, {before} ranks to {self.world_size}: {error}") from error
        if self.rank == min(before, self.world_size - 1):  # the first that may have something to derive
            names = ", ".join(sorted(adapted.derive))
            told = f"random generators of ranks from {before} on are derived: {names}" if names else "nothing is derived"
            print(f"keepstep: step {state.step} of {before} ranks goes on with {self.world_size}; {told}", flush=True)
        return replace(state, own=adapted.own, ranks=()), adapted.derive

    # -- steps

    def step(self, **values: Any) -> None:
        """One step is finished. ``values`` are metrics (numbers or one-element tensors), or new trees for parts named in ``restore``.

        Raises StateError naming the path where a part holds something that cannot be saved, ValueError for a metric that is no number.
        """
        now = time.perf_counter()
        if self._step_ended is not None:
            self._step_seconds = now - self._step_ended
            self._cadence.observe_step(self._step_seconds)
        self.steps += 1
        if not 0 < self.steps <= MAX_STEP:
            raise ValueError(f"run.steps: {self.steps} is no number of finished steps, they are 1 to 2**53 - 1; let `step` count them")
        if self._parts is not None:
            for name in self._parts.keys() & values.keys():
                self._parts[name] = values.pop(name)
        for part in self._counters:
            part.step_finished()
        self._agree()
        if self._board:
            if self._phase is not RankPhase.STEP:
                self._enter(RankPhase.STEP)
            if values:
                self._show({name: _number(name, value) for name, value in values.items()})
            self._board.finish_step(self.steps, unix_time(), self._phases_s)
            self._phases_s = 0.0
        if self._writer is not None:
            self._snapshot_if_due()
        self._step_ended = time.perf_counter()

    def _show(self, metrics: dict[str, float]) -> None:
        """On the board, with what is known of non-finite ones: a reader may miss the step at which it happened."""
        assert self._board is not None
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        for name in bad:
            self._nonfinite.setdefault(name, self.steps)
        self._bad_reports = (*self._bad_reports, self.steps) if bad else ()
        since = self._nonfinite_since = self._bad_reports[0] if len(self._bad_reports) >= PERSISTENT else 0
        self._bad_reports = self._bad_reports[:PERSISTENT]
        self._board.metrics(metrics, self._nonfinite, since)

    def _agree(self) -> None:
        step = self.steps
        if self._cadence.auto and self._writer is not None:
            if decision_at(step):
                self._agreement.post_interval(step, self._cadence.decide())
            if step > LAG and decision_at(step - LAG):
                self._sought = step - LAG
            if self._sought is not None and (every := self._agreement.interval(self._sought)):
                self._cadence.every, self._sought = every, None
        if self._told_to_stop:
            self._agreement.seek_stop(step, self._step_seconds)

    def _snapshot_if_due(self) -> None:
        assert self._board is not None
        every = self._environment.every_steps
        pin = (every is not None and self.steps % every == 0) or self._board.checkpoint_request == self.steps
        self._owed = self._owed or self._cadence.due(self.steps)
        # A rank that runs ahead overwrites the step at which the others still are, so between synchronised steps only pinned ones are kept.
        if pin or self._agreement.stop_at == self.steps or (self._owed and not self._framework.adrift(self._parts or {})):
            self._owed = False
            self._snapshot(pin)

    def _snapshot(self, pin: bool) -> None:
        assert self._writer is not None
        assert self._parts is not None
        assert self._environment.shm is not None
        if not self._writer.takes(pin):
            return
        begun = time.perf_counter()
        try:
            shared, own = self._framework.capture(self._parts)
            if self._elastic:
                own[CONSENT] = True
            if self._nonfinite_since:
                own["nonfinite_since"] = self._nonfinite_since
            written = self._writer.write(self.steps, shared, own, pin)
        except OSError as error:
            self._writer = None
            self._degrade(0, f"{self._environment.shm} cannot take a snapshot ({error.strerror}): no more of them, and no more checkpoints")
            return
        if self._writer.limit < self._slots:
            self._degrade(self._writer.limit, sentence(self._writer.limit, self._writer.size, self._environment.shm))
        if written is not None and not written.cold:
            self._cadence.observe_stall(time.perf_counter() - begun)

    def _degrade(self, slots: int, text: str) -> None:
        """Tell it once, in the log and to the agent."""
        assert self._environment.shm is not None
        self._slots = slots
        leave_note(self._environment.shm, self.rank, slots, text)
        print(f"keepstep: {text}", file=sys.stderr, flush=True)

    # -- signals and phases

    @property
    def should_stop(self) -> bool:
        """True when the job asked its ranks to end: leave the loop after this step. All ranks see it after the same step."""
        if not self._told_to_stop:
            return False
        alone = self.world_size == 1 or self._framework.store is None
        self._answered = alone or (self._agreement.stop_at is not None and self.steps >= self._agreement.stop_at)
        return self._answered

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce work between steps, so that its silence is no hang: ``with run.phase("eval")``; also compile, save, restore."""
        before, begun = self._phase, time.perf_counter()
        self._enter(RankPhase(name))
        try:
            yield
        finally:
            self._phases_s += time.perf_counter() - begun
            self._enter(before)

    def _enter(self, phase: RankPhase) -> None:
        self._phase = phase
        if self._board:
            self._board.phase(phase)

    def finish(self) -> None:
        """The script ended by itself: keep its last step for the final checkpoint. Called at exit; harmless to call twice."""
        if self._failed:
            return
        saved = True
        if self._writer is not None and self._writer.newest < self.steps and self._between_steps():
            self._enter(RankPhase.SAVE)
            self._snapshot(pin=True)
        if self._writer is not None:  # it may just have failed
            self._writer.pin_newest()
            saved = self._writer.newest >= self.steps
        self._writer = None
        if saved or not self._told_to_stop:
            self._enter(RankPhase.DONE)
        self._framework.close()

    def _between_steps(self) -> bool:
        """Nothing says that the state is another one than after the last step: SIGTERM may have ended the script anywhere, unless the
        script knew of it from ``should_stop``; data may have been taken, or the optimizer have stepped, for a step that was never finished.
        """
        return (self._answered or not self._told_to_stop) and not any(part.moved() for part in self._counters)

    def fail(self) -> None:
        """The script does not end well, so ``finish`` keeps nothing."""
        self._failed = True

    def watch(self) -> None:
        """Take note of SIGTERM, of an uncaught exception and of the end of the interpreter, all of them in this process only."""
        atexit.register(self.finish)
        hook = sys.excepthook

        def failed(*error: Any) -> None:
            self.fail()
            hook(*error)

        sys.excepthook = failed
        if self._environment.launched and threading.current_thread() is threading.main_thread():
            self._chain_sigterm()
        os.register_at_fork(after_in_child=self._let_go)

    def _let_go(self) -> None:
        atexit.unregister(self.finish)
        self._board = self._writer = None

    def _chain_sigterm(self) -> None:
        # Alone, SIGTERM keeps its meaning: nobody promised that the script asks should_stop.
        theirs = signal.getsignal(signal.SIGTERM)
        if theirs is signal.SIG_IGN:
            return

        def told(number: int, frame: FrameType | None) -> None:
            self._told_to_stop = True
            if callable(theirs):
                theirs(number, frame)

        def as_before() -> None:  # or a child that is told to end would never do so
            if signal.getsignal(signal.SIGTERM) is told:
                signal.signal(signal.SIGTERM, theirs)

        signal.signal(signal.SIGTERM, told)
        os.register_at_fork(after_in_child=as_before)


def start(framework: str | None = None) -> Run:
    """Join the group that the environment names, or work alone. Call it once, before the model is made.

    ``framework``: pytorch, tensorflow or plain; default: the job's, else the one that was imported. Raises BadEnvironment, RuntimeError.
    """
    global _started
    if _started is not None:
        raise RuntimeError("workers.start: called twice in one process; keep the run that the first call returned")
    environment = read_environment()
    _started = Run(environment, adapter(framework or environment.framework, environment))
    _started.watch()
    return _started


_started: Run | None = None


def failed() -> None:
    """The script ends with another code than 0, which no handler at exit is told."""
    if _started is not None:
        _started.fail()


def _check_parts(parts: dict[str, Any], state: Restored) -> None:
    saved = set(state.shared) | set(state.own["parts"])
    if saved != set(parts):
        raise StateError(
            f"restore: the state of step {state.step} has the parts {sorted(saved)}, the script names {sorted(parts)}; name the same parts"
        )


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):  # float("1") would take it for a number
            raise TypeError(value)
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"step: metric {name!r} is a {type(value).__qualname__}; pass a number or a one-element tensor") from error
