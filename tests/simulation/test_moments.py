"""Every kind of fault at every moment of a group's life: whatever the group is at, the job ends as it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from orchestrator.core.model import Job
from orchestrator.core.states import AttemptState, JobState
from tests.simulation.checks import check_verdict
from tests.simulation.driver import Run
from tests.simulation.group import SimGroup
from workers.group import Doing

STEPS = 70
LED_AT = 30  # a step after the first checkpoint, which is of step 20
ENDS_S = 900.0  # within which every job must have ended
SPEC = {
    "name": "moment",
    "framework": "plain",
    "command": ["train", str(STEPS)],
    "resources": {"nodes": 2, "cpus_per_node": 1, "processes_per_node": 2},
    "timeouts": {"start_s": 60, "grace_s": 5},
}


@dataclass(frozen=True)
class Moment:
    """``way`` leads there from a generation that trains; None: every job comes by."""

    doing: Doing
    way: Callable[[Scene, SimGroup], None] | None = None
    ends: JobState = JobState.SUCCEEDED  # without a further fault


@dataclass(frozen=True)
class Fault:
    happens: Callable[[Scene, SimGroup], None]
    acted: bool = False  # after the orders that follow from the decision, rather than before


@dataclass
class Scene:
    run: Run
    moment: Moment
    fault: Fault
    led: bool = False
    left: bool = False  # the generation that trained when the way began
    reached: bool = False
    bug: bool = False  # the program itself has failed
    calm: list[Callable[[], None]] = field(default_factory=list)  # what ends the fault, some time later

    @property
    def now(self) -> float:
        return self.run.clock.now()

    def watch(self, group: SimGroup, acted: bool) -> None:
        if self.moment.way is not None and not self.led:
            if group.group.doing is Doing.TRAINING and group.group.training and (group.group.best_step or 0) >= LED_AT:
                self.led = True
                self.moment.way(self, group)
            return
        self.left |= self.moment.way is None or group.group.doing is not Doing.TRAINING
        if self.left and not self.reached and group.group.doing is self.moment.doing and acted is self.fault.acted:
            self.reached = True
            self.fault.happens(self, group)


def _fails(how: str) -> Callable[[Scene, SimGroup], None]:
    def happen(scene: Scene, group: SimGroup) -> None:
        scene.bug |= how == "bug" and any(rank.ended_at is None for rank in group.ranks) and group.group.doing != Doing.STOPPING
        group.rank_fails(how, scene.now)

    return happen


def _forgets_and_fails(nodes: slice) -> Callable[[Scene, SimGroup], None]:
    def happen(scene: Scene, group: SimGroup) -> None:
        for agent in group.agents[nodes]:
            agent.loses_memory()
        group.rank_fails("kill", scene.now)

    return happen


def _cancel(scene: Scene, group: SimGroup) -> None:
    scene.run.service.cancel(scene.run.jobs[0], None)


def _agent(back_in: float) -> Callable[[Scene, SimGroup], None]:
    return lambda scene, group: group.agent_dies(scene.now, back_in)


def _node(scene: Scene, group: SimGroup) -> None:
    down = scene.run.cluster.down
    down.add(group.spec.nodes[-1].node_id)
    scene.calm.append(down.clear)


def _coordinator(forgets: bool) -> Callable[[Scene, SimGroup], None]:
    return lambda scene, group: group.coordinator_dies(scene.now, 3.0, forgets)


def _silent(scene: Scene, group: SimGroup) -> None:
    group.silent_until = scene.now + 20.0


def _vanishes(scene: Scene, group: SimGroup) -> None:
    scene.calm.append(lambda: scene.run.cluster.vanish(group.key))


def _server(crash: str) -> Callable[[Scene, SimGroup], None]:
    return lambda scene, group: setattr(scene.run.store, "crash", crash)


def _orders(fate: str) -> Callable[[Scene, SimGroup], None]:
    def happen(scene: Scene, group: SimGroup) -> None:
        group.orders = fate
        scene.calm.append(lambda: setattr(group, "orders", "done"))

    return happen


def _calls(fate: str) -> Callable[[Scene, SimGroup], None]:
    return lambda scene, group: setattr(scene.run.cluster, "calls", fate)


MOMENTS = {
    "placing": Moment(Doing.PLACING),
    "warming": Moment(Doing.WARMING),
    "warming again": Moment(Doing.WARMING, _agent(0.5)),
    "locating": Moment(Doing.LOCATING),
    "locating again": Moment(Doing.LOCATING, _forgets_and_fails(slice(None))),
    "staging": Moment(Doing.STAGING, _forgets_and_fails(slice(None))),
    "fetching": Moment(Doing.FETCHING, _forgets_and_fails(slice(1, None))),
    "launching": Moment(Doing.LAUNCHING),
    "launching again": Moment(Doing.LAUNCHING, _fails("kill")),
    "training": Moment(Doing.TRAINING),
    "training again": Moment(Doing.TRAINING, _fails("kill")),
    "stopping": Moment(Doing.STOPPING, _fails("kill")),
    "finishing": Moment(Doing.FINISHING),
    "ending": Moment(Doing.ENDING, _cancel, JobState.CANCELLED),
    "closing": Moment(Doing.CLOSING),
    "closing, failed": Moment(Doing.CLOSING, _fails("bug"), JobState.FAILED),
    "ended": Moment(Doing.ENDED),
    "ended, failed": Moment(Doing.ENDED, _fails("bug"), JobState.FAILED),
    "ended, cancelled": Moment(Doing.ENDED, _cancel, JobState.CANCELLED),
}
FAULTS = {
    "none": Fault(lambda scene, group: None),
    "kill": Fault(_fails("kill"), acted=True),
    "hang": Fault(_fails("hang"), acted=True),
    "bug": Fault(_fails("bug"), acted=True),
    "agent": Fault(_agent(0.5)),
    "agent, long": Fault(_agent(100.0), acted=True),
    "node": Fault(_node),
    "coordinator": Fault(_coordinator(forgets=False)),
    "coordinator, forgetful": Fault(_coordinator(forgets=True)),
    "coordinator, later": Fault(_coordinator(forgets=False), acted=True),
    "vanishes": Fault(_vanishes, acted=True),
    "silent": Fault(_silent),
    "server, not saved": Fault(_server("before")),
    "server, saved": Fault(_server("after")),
    "orders lost": Fault(_orders("lost")),
    "orders late": Fault(_orders("late")),
    "orders twice": Fault(_orders("twice")),
    "calls lost": Fault(_calls("lost")),
    "calls late": Fault(_calls("late")),
    "calls twice": Fault(_calls("twice")),
}


def test_every_state_has_its_moment() -> None:
    assert {moment.doing for moment in MOMENTS.values()} == set(Doing)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_fault_at_every_moment(moment: str, fault: str) -> None:
    run = Run(seed=0, nodes=3)
    run.dice.faults = False
    scene = Scene(run, MOMENTS[moment], FAULTS[fault])
    run.cluster.watch = scene.watch
    run.submit(SPEC)
    try:
        job = _to_the_end(scene)
        assert scene.reached, f"{moment} was never reached; the job is {job.state}"
        assert job.state in _right(scene, fault), f"{job.state} {job.reason}: {job.message}"
        attempts = run.store.attempts(job.id)
        check_verdict(job, attempts, user_error=scene.bug)
        assert all(attempt.state is AttemptState.ENDED for attempt in attempts)
        if job.state is JobState.SUCCEEDED:
            still_open = [incident for incident in run.store.incidents(job.id, 100, None)[0] if incident.recovered_at is None]
            assert not still_open
    finally:
        run.engine.dispose()


def _right(scene: Scene, fault: str) -> set[JobState]:
    """Final states that are right: an outcome that was lost with the group may be found out anew."""
    ends = scene.moment.ends
    if ends is JobState.SUCCEEDED and scene.bug:
        return {JobState.FAILED}
    return {ends, JobState.SUCCEEDED} if ends is JobState.FAILED and fault == "vanishes" else {ends}


def _to_the_end(scene: Scene) -> Job:
    run = scene.run
    until, calm_at = scene.now + ENDS_S, None
    while scene.now < until:
        run.clock.at += 0.5
        run.cluster.advance()
        if scene.calm and calm_at is None:
            calm_at = scene.now + 0.25 + 8.0 * (scene.fault is not FAULTS["vanishes"])
        if calm_at is not None and scene.now >= calm_at:
            for end in scene.calm:
                end()
            scene.calm, calm_at = [], None
        run.turn()
        run.check_now()
        job = run.job(run.jobs[0])
        if job.state.final and not run.cluster.groups and not run.cluster.late and not run.unfinished():
            return job
    return run.job(run.jobs[0])
