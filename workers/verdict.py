"""PURE: from the ends of ranks to one true verdict: which rank is to blame, why, and whose budget pays.

Invariants: a signal that we sent is never blamed; an error that only says that a peer is gone is secondary; the first primary failure is
the cause. Same causes at the same place give equal signatures.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass

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
DRILL_EXIT_CODE = int(signals.SIGRTMIN) + 1


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


def failed(rank: RankReport) -> bool:
    """Ended by itself other than with 0, or by a signal that is not ours."""
    return not rank.ours and (bool(rank.exit_code) or rank.signal is not None)


def secondary(rank: RankReport) -> bool:
    """True for an error that only tells that a peer is gone."""
    if not failed(rank) or rank.signal is not None:
        return False
    said = rank.error.message + rank.error.traceback if rank.error else rank.tail
    return any(words in said for words in SECONDARY)


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
    by = f", sent by drill {rank.drill}" if rank.drill else ""
    return Verdict(
        FailureClass.INFRASTRUCTURE,
        "signal",
        rank.rank,
        f"rank {rank.rank} was ended by {name}{by}",
        f"signal {name} rank {rank.rank}",
        rank.ended_at or 0.0,
        excerpt=rank.tail,
        signal=rank.signal,
        drill=rank.drill,
    )


def _by_exit(rank: RankReport) -> Verdict:
    at = rank.ended_at or 0.0
    if rank.drill is not None and rank.exit_code == DRILL_EXIT_CODE:
        evidence = f"rank {rank.rank} ended with exit code {rank.exit_code}, injected by drill {rank.drill}"
        return Verdict(
            FailureClass.INFRASTRUCTURE, "exit_code", rank.rank, evidence, "drill exit", at, rank.tail, rank.exit_code, drill=rank.drill
        )
    error = rank.error
    if error is None:
        evidence = f"rank {rank.rank} ended with exit code {rank.exit_code}"
        kind, signature = FailureClass.USER, f"exit code {rank.exit_code} rank {rank.rank}"
        if any(words in rank.tail for words in ADDRESS_IN_USE):
            kind = FailureClass.INFRASTRUCTURE
        elif secondary(rank):
            kind = FailureClass.UNKNOWN
        return Verdict(kind, "exit_code", rank.rank, evidence, signature, at, rank.tail, rank.exit_code)
    first_line = error.message.strip().splitlines()[0][:300] if error.message.strip() else ""
    evidence = f"rank {rank.rank} raised {error.type}: {first_line} ({error.place})"
    kind = FailureClass.USER
    if error.type.rsplit(".", 1)[-1] in OUT_OF_MEMORY_TYPES or any(words in error.message for words in OUT_OF_MEMORY_WORDS):
        kind = FailureClass.OUT_OF_MEMORY
    elif any(words in error.message for words in ADDRESS_IN_USE):
        kind = FailureClass.INFRASTRUCTURE  # ports are ours to give
    elif secondary(rank):
        kind = FailureClass.UNKNOWN
    return Verdict(kind, "exception", rank.rank, evidence, f"{error.type} at {error.place}", at, error.traceback[-8192:], rank.exit_code)


def judge_hang(ranks: Sequence[RankReport], silent_s: float, limit_s: float) -> Verdict:
    """Blame for a group that makes no step: a stopped process first, else a rank that left, else the one that is furthest behind."""
    stopped = [r for r in ranks if r.os_state == "T"]
    left = [r for r in ranks if r.exit_code == 0]
    by_step = sorted(ranks, key=lambda r: (r.step or 0, r.step_at or 0.0, r.rank))
    blamed = (stopped or left or by_step)[0]
    why = "its process is stopped (SIGSTOP)" if stopped else "it has ended with 0" if left else "it is the furthest behind"
    since = max(r.step_at or r.phase_at or r.started_at or 0.0 for r in ranks)
    evidence = f"no step for {silent_s:.1f} s (limit {limit_s:.1f} s, phase {blamed.phase or 'step'}); rank {blamed.rank} is blamed: {why}"
    kind = FailureClass.INFRASTRUCTURE if blamed.drill or stopped else FailureClass.UNKNOWN
    return Verdict(kind, "hang", blamed.rank, evidence, f"hang rank {blamed.rank}", since, excerpt=blamed.tail, drill=blamed.drill)
