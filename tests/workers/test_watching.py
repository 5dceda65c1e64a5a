"""Boards and snapshots: since when a generation trains, how long each part of a recovery took, when silence is a hang."""

from __future__ import annotations

import pytest

from tests.workers.make import NOW, ended, group, look, rank, ranks_seen, recovery, silent, spec, status
from workers.group import AgentSeen, Doing, Recovery, Seen
from workers.incidents import closed
from workers.messages import RankPhase, RankReport
from workers.watching import EXIT_S, QUIET_S, settled, silence, training_since

OPEN = recovery()


@pytest.mark.parametrize(
    ("open_one", "ranks", "phases"),
    [
        pytest.param(
            OPEN,
            [
                rank(0, started_at=NOW - 0.75, restored_at=NOW - 0.65, new_step_at=NOW - 0.5),
                rank(1, started_at=NOW - 0.7, restored_at=NOW - 0.6, new_step_at=NOW - 0.4),
            ],
            {"detect": 100, "stop": 100, "launch": 100, "restore": 100, "first_step": 200},
            id="all parts, the slowest rank counts",
        ),
        pytest.param(
            OPEN,
            [rank(n, started_at=NOW - 0.7, restored_at=None, new_step_at=NOW - 0.5) for n in (0, 1)],
            {"detect": 100, "stop": 100, "launch": 100, "restore": 0, "first_step": 200},
            id="nothing was restored",
        ),
        pytest.param(
            OPEN,
            [silent(n, started_at=NOW - 0.7) for n in (0, 1)],
            {"detect": 100, "stop": 100, "launch": 100},
            id="a script without steps is back when it is launched",
        ),
        pytest.param(
            recovery(stopped_at=None),
            [silent(n, started_at=NOW - 0.7) for n in (0, 1)],
            {"detect": 100, "stop": 0, "launch": 200},
            id="when all had stopped is not known",
        ),
        pytest.param(
            recovery(at=NOW - 0.9, decided_at=NOW - 0.9),
            [rank(n, started_at=NOW - 0.7, restored_at=NOW - 0.7, new_step_at=NOW - 0.7) for n in (0, 1)],
            {"detect": 0, "stop": 100, "launch": 100, "restore": 0, "first_step": 0},
            id="empty parts",
        ),
    ],
)
def test_phases_add_up_to_the_recovery(open_one: Recovery, ranks: list[RankReport], phases: dict[str, float]) -> None:
    incident = closed(open_one, tuple(ranks), NOW)
    assert incident.phases_ms == pytest.approx(phases, abs=0.01)
    assert list(incident.phases_ms) == list(phases)
    assert incident.recovery_seconds == pytest.approx(sum(incident.phases_ms.values()) / 1000, abs=1e-4)
    assert incident.recovered_at == pytest.approx(incident.at + (incident.recovery_seconds or 0), abs=1e-4)


@pytest.mark.parametrize(
    ("ranks", "attached", "recovering", "since"),
    [
        pytest.param([rank(0), rank(1, new_step_at=NOW - 3)], True, False, NOW - 3, id="the last first step"),
        pytest.param([rank(0), rank(1, new_step_at=None)], True, False, None, id="one has no new step"),
        pytest.param([rank(0)], True, False, None, id="a rank is missing"),
        pytest.param([silent(0), silent(1)], True, False, None, id="earlier generations reported steps, so these will"),
        pytest.param([silent(0), silent(1, attached=True)], False, False, None, id="one rank has attached"),
        pytest.param([silent(0), silent(1, started_at=NOW - 9)], False, False, NOW - 9 + QUIET_S, id="no steps, first start"),
        pytest.param([silent(0), silent(1, started_at=NOW - 9)], False, True, NOW - 9, id="no steps, after a failure"),
    ],
)
def test_training_since(ranks: list[RankReport], attached: bool, recovering: bool, since: float | None) -> None:
    given = group(Doing.TRAINING, attached=attached, recovery=OPEN if recovering else None)
    assert training_since(given, tuple(ranks), NOW) == since


@pytest.mark.parametrize(
    ("report", "hang_s", "limit"),
    [
        (rank(0, step_slowest=None), None, 600.0),
        (rank(0), None, 10.0),
        (rank(0, step_slowest=1.0), None, 10.0),
        (rank(0, step_slowest=4.0), None, 20.0),
        (rank(0, step_slowest=4.0), 7.0, 7.0),
        (rank(0, step=None), 7.0, 600.0),
        (rank(0, phase=RankPhase.START), None, 600.0),
        (rank(0, phase=RankPhase.RESTORE), None, 600.0),
        (rank(0, phase=RankPhase.COMPILE), 7.0, 600.0),
        (rank(0, phase=RankPhase.EVAL), 7.0, 600.0),
        (rank(0, phase=RankPhase.SAVE), 7.0, 600.0),
        (rank(0, phase=RankPhase.EVAL), 900.0, 900.0),
        (rank(0, phase=RankPhase.SAVE, step_slowest=200.0), None, 1000.0),
        (rank(0, phase=RankPhase.RESTORE), 900.0, 600.0),
        (rank(0, phase=RankPhase.DONE), None, 10.0),
        (rank(0, phase=None), None, 10.0),
        (rank(0, phase=RankPhase.START, os_state="T"), None, 10.0),  # stopped: no phase goes on
        (rank(0, step=None, step_slowest=None, os_state="T"), None, 10.0),
        (rank(0, phase=RankPhase.RESTORE, os_state="T"), 7.0, 7.0),
        (rank(0, phase=RankPhase.EVAL, step_slowest=4.0, os_state="T"), None, 20.0),
    ],
)
def test_limit_of_silence(report: RankReport, hang_s: float | None, limit: float) -> None:
    given = group(Doing.TRAINING, given=spec(nodes=1, hang_s=hang_s))
    assert silence(given, aged(report, age=limit - 1), (report,), NOW) == (None, pytest.approx(NOW + 1.05, abs=1e-3))
    silent, look_again_at = silence(given, aged(report, age=limit + 0.1), (report,), NOW)
    assert look_again_at is None
    assert silent is not None
    assert silent.since == pytest.approx(NOW - limit - 0.1, abs=1e-3)
    assert f"no step for {limit + 0.1:.1f} s (limit {limit:.1f} s" in silent.said


def aged(report: RankReport, age: float) -> Seen:
    return Seen((AgentSeen(0, status(0, report, silent={0: age}), heard_at=NOW),))


@pytest.mark.parametrize(
    ("ranks", "is_hang"),
    [
        pytest.param([rank(0, step_at=NOW - 11), rank(1, step_at=NOW - 12)], True, id="all are silent"),
        pytest.param([rank(0, step_at=NOW - 11), rank(1)], False, id="one makes steps"),
        pytest.param([rank(0, step_at=NOW - 11), rank(1, step_at=NOW - 11, phase_at=NOW - 1)], False, id="one began a phase"),
        pytest.param([rank(0, step_at=NOW - 11), rank(1, step_at=NOW - 11, phase=RankPhase.EVAL)], False, id="one evaluates"),
        pytest.param([rank(0, step_at=NOW - 11), ended(1, 0, NOW - 11, step_at=NOW - 11)], True, id="the other has left"),
        pytest.param(
            [rank(0, step_at=NOW - 11), ended(1, 0, step_at=NOW - 11, phase=RankPhase.EVAL)], True, id="the phase of an ended rank"
        ),
        pytest.param([ended(0, step_at=NOW - 11), ended(1, step_at=NOW - 11)], False, id="nobody is left"),
        pytest.param(
            [silent(0, started_at=NOW - 9_999), silent(1, started_at=NOW - 9_999)], False, id="scripts without steps are left alone"
        ),
        pytest.param(
            [silent(0, started_at=NOW - 601, attached=True), silent(1, started_at=NOW - 601)], True, id="attached, but no first step"
        ),
    ],
)
def test_silence(ranks: list[RankReport], is_hang: bool) -> None:
    found, _ = silence(group(Doing.TRAINING, attached=any(r.attached for r in ranks)), ranks_seen(*ranks), tuple(ranks), NOW)
    assert (found is not None) is is_hang


def test_ranks_that_hang_before_they_attach_are_judged_where_an_earlier_generation_attached() -> None:
    ranks = (silent(0, started_at=NOW - 601), silent(1, started_at=NOW - 601))
    found, _ = silence(group(Doing.TRAINING, attached=True), ranks_seen(*ranks), ranks, NOW)
    assert found is not None


def test_the_age_is_the_agents_and_grows_only_a_little_after_its_last_word() -> None:
    """The rank's own times may be of another clock; an agent that is not heard is another failure than a rank that is silent."""
    report = rank(0, step_at=NOW - 9_999, started_at=NOW - 9_999)
    given = group(Doing.TRAINING, given=spec(nodes=1))
    for heard_ago, hang in ((0.0, False), (0.9, True), (9_999.0, True)):
        seen = Seen((AgentSeen(0, status(0, report, silent={0: 9.5}), heard_at=NOW - heard_ago),))
        assert (silence(given, seen, (report,), NOW)[0] is not None) is hang
    seen = Seen((AgentSeen(0, status(0, report, silent={0: 8.9}), heard_at=NOW - 9_999),))
    assert silence(given, seen, (report,), NOW)[0] is None


@pytest.mark.parametrize(
    ("silence_s", "ages", "is_hang"),
    [
        (None, (999.0, 999.0), False),
        (60.0, (59.0, 61.0), False),
        (60.0, (61.0, 62.0), True),
        (60.0, (61.0, None), True),
    ],
)
def test_silence_of_scripts_that_report_no_steps(silence_s: float | None, ages: tuple[float | None, ...], is_hang: bool) -> None:
    """Opt-in; a rank that has ended (None) shows nothing more."""
    ranks = tuple(silent(n) if age is not None else ended(n, attached=False) for n, age in enumerate(ages))
    statuses = [status(n, r, quiet={n: age} if age is not None else {}) for n, (r, age) in enumerate(zip(ranks, ages, strict=True))]
    found, _ = silence(group(Doing.TRAINING, attached=False, given=spec(silence_s=silence_s)), look(*statuses), ranks, NOW)
    assert (found is not None) is is_hang
    if found is not None:
        assert found.said == "no log output and no CPU time for 61.0 s (limit 60.0 s, timeouts.silence_s)"


def test_a_rank_that_raised_and_does_not_end_counts_as_ended() -> None:
    raised = rank(0, failed_at=NOW - EXIT_S - 0.1)
    after = settled(raised, NOW)
    assert (after.exit_code, after.ended_at) == (1, raised.failed_at)
    for same in (rank(0), rank(0, failed_at=NOW - EXIT_S + 0.1), ended(0, -9, failed_at=NOW - 99)):
        assert settled(same, NOW) == same
