"""PURE: from the ends of ranks to one true verdict: which rank is to blame, why, and whose budget pays.

Invariants: a signal that we sent is never blamed; an error that only says that a peer is gone is secondary; the first primary failure is
the cause. Same causes at the same place give equal signatures. Hangs are judged in ``hangs``.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.messages import FailureClass, RankReport

# What a rank says when a peer went away under it (gloo, NCCL, TensorFlow, JAX): a consequence, not a cause.
SECONDARY = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "connectFullMesh failed",
    "Broken pipe",
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "Socket Timeout",
    "failed to recv, got 0 bytes",
    "UNAVAILABLE: Socket closed",
    "Timed out waiting",
)
ADDRESS_IN_USE = ("EADDRINUSE", "Address already in use", "address already in use")
OUT_OF_MEMORY_TYPES = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")
OUT_OF_MEMORY_WORDS = ("can't allocate memory", "RESOURCE_EXHAUSTED")
CHILD_KILLED = ("is killed by signal", "exited unexpectedly")  # torch's words for a data loader worker that a signal ended
DISK_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "[Errno 28]", "[Errno 122]")
# Errors that a full disk does not make; a full disk beside them is a coincidence.
NOT_OF_DISKS = (
    "AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError", "NotImplementedError",
    "SyntaxError", "TypeError", "UnboundLocalError", "ValueError", "ZeroDivisionError",
)  # fmt: skip
STALE_STATE_TYPES = ("StateGone",)
DRILL_EXIT_CODE = int(signals.SIGRTMIN) + 1
# What people and machines send to end a process; other signals are a process's own fault.
KILLS = (signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGHUP)
# A shell tells with 128 + n that signal n ended what it ran.
_BY_SHELL = {128 + n: signals.Signals(n).name for n in (4, 6, 7, 8, 9, 11, 15)}


@dataclass(frozen=True)
class Verdict:
    """One failure, judged. ``at``: Unix time when it happened, as near as we can know."""

    kind: FailureClass
    cause: str
    rank: int | None
    evidence: str  # sentence without the action
    signature: str
    at: float
    excerpt: str = ""
    exit_code: int | None = None
    signal: int | None = None
    drill: str | None = None
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def from_outside(self) -> bool:
        """Somebody ended it, and that tells nothing about the program: a kill without a sign of too little memory, or a drill."""
        sent = self.signal if self.signal is not None else (self.exit_code or 0) - 128
        return self.drill is not None or (self.kind == FailureClass.INFRASTRUCTURE and sent in KILLS)


def failed(rank: RankReport) -> bool:
    """Ended by itself other than with 0, or by a signal that is not ours."""
    return not rank.ours and (bool(rank.exit_code) or rank.signal is not None)


def secondary(rank: RankReport) -> bool:
    """True for an error that only tells that a peer is gone."""
    if not failed(rank) or rank.signal is not None:
        return False
    return _says(rank, SECONDARY)


def judge(ranks: Sequence[RankReport]) -> Verdict | None:
    """The verdict over the ranks of one generation; None where nothing failed."""
    failures = sorted((r for r in ranks if failed(r)), key=lambda r: (secondary(r), r.ended_at or 0.0, r.rank))
    if not failures:
        return None
    first = failures[0]
    left_early = [r for r in ranks if r.exit_code == 0 and not r.ours]
    if secondary(first) and left_early:
        early = min(left_early, key=lambda r: r.ended_at or 0.0)
        return _early_exit(early, first)
    if first.launcher_lost:
        evidence = f"the launcher of node {first.node_index} ended, its ranks with it"
        signature = f"launcher_lost {first.node_index}"
        return Verdict(FailureClass.INFRASTRUCTURE, "launcher_lost", None, evidence, signature, first.ended_at or 0.0)
    if first.signal is not None:
        return _by_signal(first)
    return _by_exit(first)


def only_secondary(ranks: Sequence[RankReport]) -> bool:
    """True while every failure seen is secondary and some rank still runs: the culprit may be about to show itself."""
    failures = [r for r in ranks if failed(r)]
    running = [r for r in ranks if r.exit_code is None and r.signal is None]
    return bool(failures) and bool(running) and all(secondary(r) for r in failures) and not any(r.exit_code == 0 for r in ranks)


def judge_metrics(ranks: Sequence[RankReport]) -> Verdict | None:
    """Of a job that shall stop when its metrics stay non-finite."""
    bad = [r for r in ranks if r.nonfinite_since is not None]
    if not bad:
        return None
    first = min(bad, key=lambda r: (r.nonfinite_since or 0, r.rank))
    names = ", ".join(name for name, _ in first.nonfinite)
    evidence = f"rank {first.rank} reports {names} as NaN or infinite since step {first.nonfinite_since}"
    signature = f"non_finite {names} step {first.nonfinite_since}"
    return Verdict(FailureClass.USER, "non_finite", first.rank, evidence, signature, first.step_at or 0.0)


def judge_success(ranks: Sequence[RankReport], steps: int | None, missing: Sequence[str], now: float) -> Verdict | None:
    """Of ranks that all ended with 0. ``steps``: what each must have finished; ``missing``: files that are on no node."""
    behind = [r for r in ranks if steps is not None and max(r.step or 0, r.restored or 0) < steps]
    if not behind and not missing:
        return None
    reached = [f"rank {r.rank} finished step {max(r.step or 0, r.restored or 0)} of success.steps = {steps}" for r in behind[:1]]
    lacking = [f"success.files lacks {', '.join(missing[:5])}"] if missing else []
    evidence = f"all ranks ended with 0 before the job was complete: {'; '.join(reached + lacking)}"
    blamed, tail = (behind[0].rank, behind[0].tail) if behind else (None, "")
    at = max((r.ended_at or now for r in ranks), default=now)
    return Verdict(FailureClass.USER, "incomplete", blamed, evidence, "incomplete", at, excerpt=tail, exit_code=0)


def judge_unseen_files(files: Sequence[str], now: float) -> Verdict:
    """All ranks ended with 0, and a node does not tell whether it has the files: that is no fault of the script."""
    evidence = f"all ranks ended with 0, but not all nodes could tell whether success.files {', '.join(files[:5])} exist"
    return Verdict(FailureClass.INFRASTRUCTURE, "files_unseen", None, evidence, "files_unseen", now)


def _early_exit(early: RankReport, victim: RankReport) -> Verdict:
    where = f"at step {early.step}" if early.step else "before its first step"
    at = early.ended_at or 0.0
    return Verdict(
        FailureClass.USER,
        "early_exit",
        early.rank,
        f"rank {early.rank} ended with 0 {where} while rank {victim.rank} was still running",
        f"early_exit rank {early.rank}",
        at,
        excerpt=early.tail,
        exit_code=0,
    )


def _by_signal(rank: RankReport) -> Verdict:
    assert rank.signal is not None
    name = signals.Signals(rank.signal).name if rank.signal in set(signals.Signals) else f"signal {rank.signal}"
    who = f" rank {rank.rank}" if rank.signal in KILLS else ""  # a program aborts now on this rank, now on that
    kind, cause, signature = FailureClass.INFRASTRUCTURE, "signal", f"signal {name}{who}"
    how = f", sent by drill {rank.drill}" if rank.drill else ""
    if rank.signal == signals.SIGKILL and rank.oom_killed is not None and rank.drill != "kill":
        kind, cause, signature = FailureClass.OUT_OF_MEMORY, "oom_killed", "oom_killed"
        how = f": {rank.oom_killed}" + (f" (drill {rank.drill})" if rank.drill else "")
    evidence = f"rank {rank.rank} was ended by {name}{how}"
    at = rank.ended_at or 0.0
    return Verdict(kind, cause, rank.rank, evidence, signature, at, rank.tail, signal=rank.signal, drill=rank.drill)


def _by_exit(rank: RankReport) -> Verdict:
    at = rank.ended_at or 0.0
    if rank.drill is not None and rank.exit_code == DRILL_EXIT_CODE:
        evidence = f"rank {rank.rank} ended with exit code {rank.exit_code}, injected by drill {rank.drill}"
        return Verdict(
            FailureClass.INFRASTRUCTURE, "exit_code", rank.rank, evidence, "drill exit", at, rank.tail, rank.exit_code, drill=rank.drill
        )
    error = rank.error
    said_by = "exception" if error is not None else "exit_code"
    kind, cause, how = next((k, c, h) for applies, k, c, h in CLASSES if applies(rank))
    more = how.format(oom_killed=rank.oom_killed, disk=rank.disk_full or "the error says so, though there is room now")
    if error is None:
        by_shell = _BY_SHELL.get(rank.exit_code or 0)
        told = f": what it ran was ended by {by_shell}" if by_shell else ""
        evidence = f"rank {rank.rank} ended with exit code {rank.exit_code}{told}{more}"
        signature = f"{cause or 'exit code'} {rank.exit_code} rank {rank.rank}"
        return Verdict(kind, cause or said_by, rank.rank, evidence, signature, at, rank.tail, rank.exit_code)
    drill = rank.drill if rank.drill == "oom" and kind == FailureClass.OUT_OF_MEMORY else None
    first_line = error.message.strip().splitlines()[0][:300] if error.message.strip() else ""
    evidence = f"rank {rank.rank} raised {error.type}: {first_line} ({error.place}){more}"
    signature = f"{error.type} at {error.place}"
    return Verdict(kind, cause or said_by, rank.rank, evidence, signature, at, error.traceback[-8192:], rank.exit_code, drill=drill)


def _says(rank: RankReport, words: Sequence[str]) -> bool:
    """In its exception, or where there is none in its last log lines."""
    said = rank.error.message + rank.error.traceback if rank.error else rank.tail
    return any(w in said for w in words)


def _type_is(rank: RankReport, names: Sequence[str]) -> bool:
    return rank.error is not None and rank.error.type.rsplit(".", 1)[-1] in names


def _message_has(rank: RankReport, words: Sequence[str]) -> bool:
    return any(w in (rank.error.message if rank.error else rank.tail) for w in words)


def _of_disks(rank: RankReport) -> bool:
    return _message_has(rank, DISK_FULL_WORDS) or (rank.disk_full is not None and not _type_is(rank, NOT_OF_DISKS))


# What an end by an exception or an exit code is: the first row that applies. (applies, class, cause where it is not "exception" or
# "exit_code", what is added to the evidence)
CLASSES: tuple[tuple[Callable[[RankReport], bool], FailureClass, str | None, str], ...] = (
    (lambda r: r.error is not None and r.error.ours, FailureClass.INFRASTRUCTURE, "cannot_start", "; nothing of the script ran yet"),
    (lambda r: _type_is(r, OUT_OF_MEMORY_TYPES), FailureClass.OUT_OF_MEMORY, None, ""),
    (lambda r: r.error is not None and _message_has(r, OUT_OF_MEMORY_WORDS), FailureClass.OUT_OF_MEMORY, None, ""),
    (
        lambda r: r.oom_killed is not None and (r.exit_code == 128 + signals.SIGKILL or _says(r, CHILD_KILLED)),
        FailureClass.OUT_OF_MEMORY,
        "oom_killed",
        ": {oom_killed}",
    ),
    (_of_disks, FailureClass.DISK_FULL, "disk_full", "; no room: {disk}"),
    (lambda r: _message_has(r, ADDRESS_IN_USE), FailureClass.INFRASTRUCTURE, None, "; ports are ours to give"),
    (lambda r: _type_is(r, STALE_STATE_TYPES), FailureClass.INFRASTRUCTURE, "stale_state", ""),
    (secondary, FailureClass.UNKNOWN, None, ""),
    (lambda r: r.error is not None and _says(r, CHILD_KILLED), FailureClass.INFRASTRUCTURE, None, "; a signal ended a process of it"),
    (lambda r: r.error is None and r.exit_code in _BY_SHELL, FailureClass.INFRASTRUCTURE, None, ""),
    (lambda r: True, FailureClass.USER, None, ""),
)
