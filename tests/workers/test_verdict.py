"""Blame: how the ranks of a generation ended -> the class, the cause, the blamed rank and the signature."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tests.workers.make import NOW, PEER_GONE, ended, error, rank
from workers.messages import FailureClass, RankReport
from workers.verdict import DRILL_EXIT_CODE, SECONDARY, failed, judge, only_secondary, secondary

USER, MEMORY, DISK, INFRASTRUCTURE, UNKNOWN = (
    FailureClass.USER,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.DISK_FULL,
    FailureClass.INFRASTRUCTURE,
    FailureClass.UNKNOWN,
)
LOADER_KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."
VICTIM = ended(0, 1, NOW - 2, error=error("RuntimeError", PEER_GONE))
RAISED = ended(1, 1, NOW - 1, error=error("ValueError", "bad sample"))


def raised(type: str, message: str = "") -> RankReport:
    return ended(1, 1, error=error(type, message))


@pytest.mark.parametrize(
    ("ranks", "kind", "cause", "blamed", "signature"),
    [
        pytest.param([rank(0), ended(1, -9)], INFRASTRUCTURE, "signal", 1, "signal SIGKILL rank 1", id="killed"),
        pytest.param([rank(0), ended(1, -11)], INFRASTRUCTURE, "signal", 1, "signal SIGSEGV", id="segmentation fault"),
        pytest.param([rank(0), ended(1, -40)], INFRASTRUCTURE, "signal", 1, "signal signal 40", id="a signal without a name"),
        pytest.param(
            [VICTIM, ended(1, -9, NOW)], INFRASTRUCTURE, "signal", 1, "signal SIGKILL rank 1", id="signal, seen after its consequence"
        ),
        pytest.param(
            [VICTIM, RAISED], USER, "exception", 1, "ValueError at train.py:9 in step", id="exception, seen after its consequence"
        ),
        pytest.param(
            [ended(0, -6, NOW - 1), ended(1, -9, NOW - 2)], INFRASTRUCTURE, "signal", 1, "signal SIGKILL rank 1", id="the first signal"
        ),
        pytest.param(
            [ended(0, -9, ours=True), RAISED], USER, "exception", 1, "ValueError at train.py:9 in step", id="our signal is not blamed"
        ),
        pytest.param([ended(0, 0, NOW - 3), ended(1, 1, error=VICTIM.error)], USER, "early_exit", 0, "early_exit rank 0", id="left early"),
        pytest.param([ended(0, 0), RAISED], USER, "exception", 1, "ValueError at train.py:9 in step", id="0 and an error of its own"),
        pytest.param([VICTIM], UNKNOWN, "exception", 0, "RuntimeError at train.py:9 in step", id="only a consequence"),
        pytest.param([raised("MemoryError")], MEMORY, "exception", 1, "MemoryError at train.py:9 in step", id="host memory"),
        pytest.param(
            [raised("torch.OutOfMemoryError", "CUDA out of memory")],
            MEMORY,
            "exception",
            1,
            "torch.OutOfMemoryError at train.py:9 in step",
            id="GPU memory of torch",
        ),
        pytest.param(
            [raised("tensorflow.errors.ResourceExhaustedError")],
            MEMORY,
            "exception",
            1,
            "tensorflow.errors.ResourceExhaustedError at train.py:9 in step",
            id="GPU memory of TensorFlow",
        ),
        pytest.param(
            [raised("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")],
            MEMORY,
            "exception",
            1,
            "RuntimeError at train.py:9 in step",
            id="the allocator of torch",
        ),
        pytest.param(
            [raised("XlaRuntimeError", "RESOURCE_EXHAUSTED: out of memory")],
            MEMORY,
            "exception",
            1,
            "XlaRuntimeError at train.py:9 in step",
            id="GPU memory of JAX",
        ),
        pytest.param(
            [raised("torch.distributed.DistNetworkError", "EADDRINUSE, address already in use")],
            INFRASTRUCTURE,
            "exception",
            1,
            "torch.distributed.DistNetworkError at train.py:9 in step",
            id="a port is ours to give",
        ),
        pytest.param([ended(1, 3)], USER, "exit_code", 1, "exit code 3 rank 1", id="exit code"),
        pytest.param(
            [ended(1, 1, tail="bind: Address already in use")], INFRASTRUCTURE, "exit_code", 1, "exit code 1 rank 1", id="port in the tail"
        ),
        pytest.param([ended(1, 1, tail="x\nBroken pipe\n")], UNKNOWN, "exit_code", 1, "exit code 1 rank 1", id="consequence in the tail"),
        pytest.param([ended(1, -9, oom_killed="counted")], MEMORY, "oom_killed", 1, "oom_killed", id="the kernel killed it for memory"),
        pytest.param([ended(1, -9, oom_killed="counted", drill="oom")], MEMORY, "oom_killed", 1, "oom_killed", id="by a drill of that"),
        pytest.param(
            [ended(1, -9, oom_killed="counted", drill="kill")],
            INFRASTRUCTURE,
            "signal",
            1,
            "signal SIGKILL rank 1",
            id="a drill's SIGKILL while another was killed for memory",
        ),
        pytest.param(
            [ended(1, -11, oom_killed="counted")], INFRASTRUCTURE, "signal", 1, "signal SIGSEGV", id="no SIGKILL, no kill for memory"
        ),
        pytest.param(
            [ended(0, -9, ours=True, oom_killed="counted"), ended(1, 3)], USER, "exit_code", 1, "exit code 3 rank 1", id="our kill"
        ),
        pytest.param([ended(1, 137, oom_killed="counted")], MEMORY, "oom_killed", 1, "oom_killed 137 rank 1", id="killed below a shell"),
        pytest.param([ended(1, 137)], INFRASTRUCTURE, "exit_code", 1, "exit code 137 rank 1", id="a shell tells of SIGKILL"),
        pytest.param([ended(1, 143)], INFRASTRUCTURE, "exit_code", 1, "exit code 143 rank 1", id="a shell tells of SIGTERM"),
        pytest.param([ended(1, 255)], USER, "exit_code", 1, "exit code 255 rank 1", id="255 is no signal"),
        pytest.param(
            [raised("RuntimeError", LOADER_KILLED)],
            INFRASTRUCTURE,
            "exception",
            1,
            "RuntimeError at train.py:9 in step",
            id="loader killed",
        ),
        pytest.param(
            [replace(raised("RuntimeError", LOADER_KILLED), oom_killed="counted")],
            MEMORY,
            "oom_killed",
            1,
            "RuntimeError at train.py:9 in step",
            id="loader killed for memory",
        ),
        pytest.param(
            [raised("OSError", "[Errno 28] No space left on device: 'a'")],
            DISK,
            "disk_full",
            1,
            "OSError at train.py:9 in step",
            id="disk full by errno",
        ),
        pytest.param(
            [raised("OSError", "[Errno 122] Disk quota exceeded")], DISK, "disk_full", 1, "OSError at train.py:9 in step", id="quota"
        ),
        pytest.param(
            [replace(raised("RuntimeError", "unexpected pos 64 vs 0"), disk_full="/data has 0 bytes free")],
            DISK,
            "disk_full",
            1,
            "RuntimeError at train.py:9 in step",
            id="disk full by what the file system tells",
        ),
        pytest.param(
            [replace(raised("KeyError", "'x'"), disk_full="/data has 0 bytes free")],
            USER,
            "exception",
            1,
            "KeyError at train.py:9 in step",
            id="a full disk makes no KeyError",
        ),
        pytest.param([ended(1, 1, disk_full="/data has 0 bytes free")], DISK, "disk_full", 1, "disk_full 1 rank 1", id="disk full"),
        pytest.param(
            [ended(1, 125, error=replace(error("FileNotFoundError", "no folder", "before the first line"), ours=True))],
            INFRASTRUCTURE,
            "cannot_start",
            1,
            "FileNotFoundError at before the first line",
            id="our own set-up failed",
        ),
        pytest.param(
            [raised("workers.checkpoint.tree.StateGone", "the snapshot of step 4 is gone")],
            INFRASTRUCTURE,
            "stale_state",
            1,
            "workers.checkpoint.tree.StateGone at train.py:9 in step",
            id="the state that was to be restored is gone",
        ),
        pytest.param([ended(1, DRILL_EXIT_CODE, drill="exit")], INFRASTRUCTURE, "exit_code", 1, "drill exit", id="exit drill"),
        pytest.param([ended(1, 3, drill="exit")], USER, "exit_code", 1, "exit code 3 rank 1", id="an own exit after the drill was sent"),
    ],
)
def test_blame(ranks: list[RankReport], kind: FailureClass, cause: str, blamed: int, signature: str) -> None:
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.cause, verdict.rank, verdict.signature) == (kind, cause, blamed, signature)
    assert judge(list(reversed(ranks))) == verdict


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [rank(0), rank(1)],
        [ended(0), ended(1)],
        [ended(0), rank(1)],
        [ended(0, -9, ours=True), ended(1, 143, ours=True)],
    ],
)
def test_nothing_to_blame(ranks: list[RankReport]) -> None:
    assert judge(ranks) is None


@pytest.mark.parametrize(
    ("report", "evidence"),
    [
        (ended(1, -9), "rank 1 was ended by SIGKILL"),
        (ended(1, -9, drill="kill"), "rank 1 was ended by SIGKILL, sent by drill kill"),
        (ended(1, 3), "rank 1 ended with exit code 3"),
        (ended(1, 143), "rank 1 ended with exit code 143: what it ran was ended by SIGTERM"),
        (ended(1, -9, oom_killed="the kernel counted it"), "rank 1 was ended by SIGKILL: the kernel counted it"),
        (ended(1, 3, disk_full="/data has 0 bytes free of 9"), "rank 1 ended with exit code 3; no room: /data has 0 bytes free of 9"),
        (ended(1, DRILL_EXIT_CODE, drill="exit"), f"rank 1 ended with exit code {DRILL_EXIT_CODE}, injected by drill exit"),
        (ended(1, 1, error=error("KeyError", "'a'\nsecond line")), "rank 1 raised KeyError: 'a' (train.py:9 in step)"),
        (ended(1, 1, error=error("AssertionError")), "rank 1 raised AssertionError:  (train.py:9 in step)"),
    ],
)
def test_evidence(report: RankReport, evidence: str) -> None:
    verdict = judge([report])
    assert verdict is not None
    assert verdict.evidence == evidence


@pytest.mark.parametrize(
    ("step", "where"),
    [(12, "rank 0 ended with 0 at step 12 while rank 1 was still running"), (None, "rank 0 ended with 0 before its first step")],
)
def test_evidence_of_an_early_exit(step: int | None, where: str) -> None:
    verdict = judge([ended(0, 0, NOW - 3, step=step), ended(1, 1, error=VICTIM.error)])
    assert verdict is not None
    assert where in verdict.evidence
    assert (verdict.at, verdict.exit_code) == (NOW - 3, 0)


def test_facts_of_the_end_are_kept() -> None:
    killed, exited, raised_ = judge([ended(1, -9, tail="last words")]), judge([ended(1, 3, tail="usage")]), judge([RAISED])
    assert killed is not None
    assert (killed.signal, killed.exit_code, killed.excerpt, killed.at) == (9, None, "last words", NOW - 0.01)
    assert exited is not None
    assert (exited.signal, exited.exit_code, exited.excerpt) == (None, 3, "usage")
    assert raised_ is not None
    assert (raised_.exit_code, raised_.excerpt, raised_.at) == (1, "Traceback\nValueError: bad sample", NOW - 1)


def test_same_cause_at_the_same_place_has_the_same_signature_on_another_rank_and_message() -> None:
    verdicts = [judge([ended(n, 1, error=error("ValueError", f"sample {n}"))]) for n in (0, 1)]
    assert len({v.signature for v in verdicts if v is not None}) == 1
    elsewhere = judge([ended(0, 1, error=error("ValueError", "sample 0", "train.py:30 in evaluate"))])
    assert elsewhere is not None
    assert elsewhere.signature not in {v.signature for v in verdicts if v is not None}


@pytest.mark.parametrize("words", SECONDARY)
def test_consequences_are_known_by_their_words(words: str) -> None:
    assert secondary(ended(0, 1, error=error("RuntimeError", f"[gloo] {words} [10.0.0.2]")))
    assert secondary(ended(0, 1, tail=f"E0101 {words}"))
    assert not secondary(ended(0, -int(signal.SIGSEGV), tail=words))
    assert not secondary(rank(0, tail=words))
    assert not secondary(ended(0, 1, error=error("ValueError", "bad"), tail=words))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([VICTIM, rank(1)], True),
        ([VICTIM, ended(1, 1, error=VICTIM.error)], False),
        ([VICTIM, ended(1, 0)], False),
        ([VICTIM, ended(1, 0), rank(2)], False),
        ([VICTIM, RAISED, rank(2)], False),
        ([VICTIM, ended(1, -9), rank(2)], False),
        ([rank(0), rank(1)], False),
    ],
)
def test_wait_for_the_culprit_only_while_it_may_still_show(ranks: list[RankReport], expected: bool) -> None:
    assert only_secondary(ranks) is expected


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (rank(0), False),
        (ended(0), False),
        (ended(0, 1), True),
        (ended(0, -9), True),
        (ended(0, -9, ours=True), False),
        (ended(0, 1, ours=True), False),
    ],
)
def test_failed(report: RankReport, expected: bool) -> None:
    assert failed(report) is expected
