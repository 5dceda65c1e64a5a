"""Use cases and loop over the real store and a simulated cluster without faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from orchestrator.adapters.db.leases import SqlLeases
from orchestrator.adapters.db.store import SqlStore
from orchestrator.adapters.db.tables import JOBS
from orchestrator.adapters.storage.checkpoints import StoredCheckpoints
from orchestrator.core.actions import EndGroup, JobStep
from orchestrator.core.model import Job
from orchestrator.core.scheduling import Placement, Waiting
from orchestrator.core.spec import JOB_ID
from orchestrator.core.states import Desired, JobState
from orchestrator.ports import Conflict, KeyReused, Unavailable
from orchestrator.reconciler import Reconciler
from orchestrator.service import NotFound, Refused, Service, new_job_id
from tests.core.make import ROOTS, spec
from tests.simulation.clock import Dice, SimClock, at_once
from tests.simulation.cluster import SimCluster
from tests.simulation.leases import leading
from workers.messages import CheckpointRecord

TRAIN = {"command": ["train", "20"]}


class Place:
    """A control plane without the thread: each ``look`` is one pass."""

    def __init__(self, store: SqlStore, folder: Path) -> None:
        self.store, self.clock, self.wake = store, SimClock(), threading.Event()
        self.cluster = SimCluster(self.clock, Dice(1, faults=False), nodes=1)
        self.service = Service(
            store,
            self.cluster,
            self.cluster,
            self.clock,
            self.wake,
            bundle_exists=lambda sha: sha == "a" * 64,
            stored=StoredCheckpoints(),
            folder_of=lambda job: str(folder / job.id),
        )
        self.lease = leading(SqlLeases(store._engine), self.wake)
        self.loop = Reconciler(store, self.cluster, self.cluster, self.clock, ROOTS, self.wake, self.lease, submit=at_once)

    def submit(self, **changes: Any) -> Job:
        self.clock.at += 1
        return self.service.submit(spec(**{**TRAIN, **changes}), None, "")[0]

    def look(self, times: int = 1, seconds: float = 1) -> None:
        for _ in range(times):
            self.clock.at += seconds
            self.cluster.advance()
            self.loop.once()


@pytest.fixture
def place(sqlite_store: SqlStore, tmp_path: Path) -> Iterator[Place]:
    made = Place(sqlite_store, tmp_path / "jobs")
    yield made
    made.loop.stop()


def code(call: Any, *arguments: Any) -> str:
    with pytest.raises((NotFound, Refused)) as caught:
        call(*arguments)
    return str(caught.value.code)


def test_a_job_runs_to_its_end(place: Place) -> None:
    job = place.submit()
    assert JOB_ID.fullmatch(job.id)
    assert place.wake.is_set()
    place.look(40)
    ended = place.service.job("a")
    assert (ended.id, ended.state, ended.reason, ended.best_step) == (job.id, JobState.SUCCEEDED, "Completed", 20)
    assert [a.state for a in place.service.attempts(job.id)] == ["ENDED"]
    reasons = [e.reason for e in place.service.events(job.id, 200, None)[0]]
    assert {"Submitted", "Placed", "Training", "Completed"} <= set(reasons)
    assert [r.rank for r in place.service.ranks("a")] == [0]
    assert place.loop.errors == 0


def test_submit_is_idempotent_by_key(place: Place) -> None:
    first, new = place.service.submit(spec(), "key", "hash")
    again, renewed = place.service.submit(spec(), "key", "hash")
    assert (first.id, new, renewed) == (again.id, True, False)
    with pytest.raises(KeyReused):
        place.service.submit(spec(), "key", "other")


def test_a_bundle_must_have_been_uploaded(place: Place) -> None:
    assert place.submit(bundle="a" * 64).spec.bundle == "a" * 64
    assert code(place.service.submit, spec(bundle="b" * 64), None, "") == "bundle_not_found"


def test_plan_tells_and_changes_nothing(place: Place) -> None:
    assert isinstance(place.service.plan(spec()), Placement)
    place.submit(resources={"cpus_per_node": 4})
    place.clock.at += 1
    answer = place.service.plan(spec())
    assert isinstance(answer, Waiting)
    assert answer.message.endswith("position 2")
    assert len(place.service.jobs(None, {}, 50, None)[0]) == 1


def test_cancel_is_idempotent_and_stops_at_final_jobs(place: Place) -> None:
    job = place.submit()
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: place.service.cancel(job.id, 3.0), range(10)))
    assert {(a.desired, a.grace_s) for a in answers} == {(Desired.CANCEL, 3.0)}
    place.look()
    assert place.service.cancel(job.id).state is JobState.CANCELLED
    assert [e.reason for e in place.service.events(job.id, 200, None)[0]].count("CancelAsked") == 1
    done = place.submit()
    place.look(40)
    assert code(place.service.cancel, done.id) == "job_is_final"
    assert code(place.service.cancel, "job-zzzzzzzzzzzz") == "job_not_found"


def test_a_second_cancel_may_only_shorten_the_grace(place: Place) -> None:
    job = place.submit(timeouts={"grace_s": 60})
    place.look(8)
    (group,) = place.cluster.groups.values()
    for asked, kept, used in [(None, None, 60), (60, None, 60), (90, None, 60), (40, 40, 40), (None, 40, 40), (50, 40, 40), (5, 5, 5)]:
        assert place.service.cancel(job.id, asked).grace_s == kept
        place.loop.once()
        assert group.end_request is not None
        assert group.end_request.grace_s == used
    told = [e.message for e in place.service.events(job.id, 200, None)[0] if e.reason == "CancelAsked"]
    assert told == ["a user asked to cancel the job", *(f"a user asked to end the job sooner: grace {s} s" for s in (40, 5))]


def test_only_an_ended_job_that_keeps_nothing_pinned_is_deleted(place: Place, tmp_path: Path) -> None:
    other, job = place.submit(), place.submit()
    folder = tmp_path / "jobs" / job.id
    (folder / "checkpoints").mkdir(parents=True)
    assert code(place.service.delete, job.id) == "job_not_final"
    assert code(place.service.delete, "a") == "id_needed"
    place.look(40)
    record = CheckpointRecord(job.id, 1, 0, 20, str(folder / "checkpoints/x"), 1, 1, 1, 1.0, 1.0)
    known = place.service.job(job.id)
    place.store.save_step(JobStep(known, None, checkpoints=(record,)))
    place.store.save_pin(job.id, record.url, 1.0)
    assert code(place.service.delete, job.id) == "checkpoint_pinned"
    assert folder.exists()
    place.store.save_pin(job.id, record.url, None)
    place.service.delete(job.id)
    assert not folder.exists()
    assert code(place.service.job, job.id) == "job_not_found"
    assert code(place.service.delete, job.id) == "job_not_found"
    assert place.store.events(job.id, 50, None)[0] == []
    assert place.service.job(other.id).state is JobState.SUCCEEDED


def test_a_job_whose_folder_cannot_be_removed_is_kept(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = place.submit()
    place.look(40)
    (tmp_path / "jobs" / job.id).mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Unavailable, match="cannot be removed"):
            place.service.delete(job.id)
    assert place.service.job(job.id).id == job.id
    place.service.delete(job.id)
    assert code(place.service.job, job.id) == "job_not_found"


@pytest.mark.parametrize("looks", range(12))
def test_cancel_at_any_moment_leaves_nothing(place: Place, looks: int) -> None:
    job = place.submit(timeouts={"grace_s": 2})
    place.look(looks, seconds=0.7)
    place.service.cancel(job.id)
    place.look(15)
    assert place.service.job(job.id).state is JobState.CANCELLED
    assert place.cluster.groups == {}


def test_a_name_shared_by_active_jobs_is_no_target(place: Place) -> None:
    ids = {place.submit().id, place.submit().id}
    with pytest.raises(Refused, match=" and | ".join(ids)) as caught:
        place.service.cancel("a")
    assert caught.value.code == "ambiguous_name"
    place.service.cancel(ids.pop())
    place.look()
    assert place.service.cancel("a").id == ids.pop()


def test_drills_need_a_running_job_and_a_rank_of_it(place: Place) -> None:
    job = place.submit()
    assert code(place.service.drill, job.id, "kill", 0) == "job_not_running"
    place.look(8)
    assert place.service.job(job.id).state is JobState.RUNNING
    assert code(place.service.drill, job.id, "kill", 1) == "rank_out_of_range"
    assert code(place.service.drill, job.id, "burn", 0) == "unknown_fault"
    assert code(place.service.drill, job.id, "kill", 0) == "drill_not_possible"


def test_the_next_pass_is_soon_while_things_move_and_late_when_nothing_does(place: Place) -> None:
    assert place.loop.once() == 5.0
    place.submit()
    assert place.loop.once() < 0.1
    place.look(40)
    assert place.loop.once() == 5.0


def test_a_pass_without_a_database_says_so(place: Place) -> None:
    class Away(SqlStore):
        def open_jobs(self) -> Any:
            raise Unavailable("database is away")

    loop = Reconciler(Away(place.store._engine), place.cluster, place.cluster, place.clock, ROOTS, place.wake, place.lease, submit=at_once)
    with pytest.raises(Unavailable):
        loop.once()
    assert loop.last_pass_at is None


def test_a_job_that_cannot_be_saved_stops_nobody_else(place: Place) -> None:
    bad, good = place.submit(), place.submit()

    class Picky(SqlStore):
        def save_step(self, step: Any, fence: int | None = None) -> Job:
            if step.job.id == bad.id:
                raise ValueError("a poisoned row")
            return super().save_step(step, fence)

    loop = Reconciler(Picky(place.store._engine), place.cluster, place.cluster, place.clock, ROOTS, place.wake, place.lease, submit=at_once)
    loop.once()
    assert (place.service.job(bad.id).state, place.service.job(good.id).state) == (JobState.PENDING, JobState.STARTING)
    assert (loop.errors, sorted(place.cluster.groups)) == (1, [(good.id, 1)])


def test_a_row_that_cannot_be_read_stops_nobody_else_and_keeps_its_group(place: Place) -> None:
    bad, good = place.submit(), place.submit()
    place.look(3)
    with place.store._engine.begin() as connection:
        connection.execute(update(JOBS).where(JOBS.c.id == bad.id).values(spec="{"))
    place.look(40)
    assert place.service.job(good.id).state is JobState.SUCCEEDED
    assert list(place.cluster.groups) == [(bad.id, 1)]


class Slow:
    """``submit`` of an executor whose actions end when told, one by one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Future[bool]]] = []

    def __call__(self, work: Any) -> Future[bool]:
        self.calls.append((work, Future()))
        return self.calls[-1][1]

    def end(self) -> None:
        work, future = self.calls.pop(0)
        future.set_result(at_once(work).result())


def test_a_slow_action_holds_up_nothing_and_has_no_second_beside_it(place: Place) -> None:
    slow = Slow()
    place.loop = Reconciler(place.store, place.cluster, place.cluster, place.clock, ROOTS, place.wake, place.lease, submit=slow)
    first = place.submit(resources={"cpus_per_node": 1})
    place.look(3)
    assert len(slow.calls) == 1  # the group is made for three passes, and nobody asks for it again
    second = place.submit(resources={"cpus_per_node": 1})
    place.look()
    assert [place.service.job(job.id).state for job in (first, second)] == [JobState.STARTING, JobState.STARTING]
    assert place.loop.last_pass_at == place.clock.now()
    place.service.cancel(first.id)
    slow.end()
    place.look(5)
    assert [key[0] for key in place.cluster.groups] == [first.id]
    assert len(slow.calls) == 2  # of the second job: still to be made; of the first: to be ended
    slow.end()
    slow.end()
    place.look(3)
    while isinstance(slow.calls[0][0].args[0], EndGroup):  # asked again, where the group had not ended at that look
        slow.end()
        place.look()
    assert (len(slow.calls), place.service.job(first.id).state) == (1, JobState.CANCELLING)
    place.wake.clear()
    slow.end()
    assert place.wake.wait(10)
    assert place.service.job(first.id).state is JobState.CANCELLING
    place.look()
    assert place.service.job(first.id).state is JobState.CANCELLED
    assert place.loop.errors == 0


def test_a_removal_that_fails_is_told_and_tried_again(place: Place) -> None:
    job, remove = place.submit(), place.cluster.remove
    place.look(8)
    place.cluster.remove = lambda *_: _stuck()  # type: ignore[method-assign]
    place.service.cancel(job.id, 0.0)
    place.look(20)
    told = place.service.job(job.id)
    assert (told.state, told.reason, told.ended_at) == (JobState.CANCELLING, "NotRemoved", None)
    assert told.message == "attempt 1 cannot be removed yet: processes [71] on node n1 do not end; it is tried again"
    assert [e.reason for e in place.service.events(job.id, 200, None)[0]].count("NotRemoved") == 1
    place.cluster.remove = remove  # type: ignore[method-assign]
    place.look(2)
    assert place.service.job(job.id).state is JobState.CANCELLED


def _stuck() -> bool:
    raise Unavailable("processes [71] on node n1 do not end")


def test_a_step_that_finds_another_version_does_nothing(place: Place) -> None:
    job = place.submit()

    class Late(SqlStore):
        def save_step(self, step: Any, fence: int | None = None) -> Job:
            raise Conflict("changed")

    loop = Reconciler(Late(place.store._engine), place.cluster, place.cluster, place.clock, ROOTS, place.wake, place.lease, submit=at_once)
    assert loop.once() < 0.1
    assert (place.service.job(job.id).state, place.cluster.groups) == (JobState.PENDING, {})


def test_the_thread_wakes_when_told_and_stops(place: Place) -> None:
    loop = Reconciler(place.store, place.cluster, place.cluster, place.clock, ROOTS, place.wake, place.lease)
    passed = threading.Event()
    place.cluster.in_between = passed.set
    loop.start()
    assert passed.wait(10)
    passed.clear()
    place.submit()
    assert passed.wait(4)  # sooner than an idle loop would look
    loop.stop()
    assert loop.last_pass_at is not None


def test_ids_are_new_each_time() -> None:
    assert len({new_job_id() for _ in range(1000)}) == 1000


def test_a_queue_that_moves_is_told_without_events(place: Place) -> None:
    first, *waiting = [place.submit(name=f"job {number}", resources={"cpus_per_node": 4}) for number in range(4)]
    place.look(2)
    before = [place.service.job(job.id) for job in waiting]
    assert [job.message[-10:] for job in before] == ["position 1", "position 2", "position 3"]
    place.service.cancel(waiting[0].id)
    place.look()
    moved = [place.service.job(job.id) for job in waiting[1:]]
    assert [job.message[-10:] for job in moved] == ["position 1", "position 2"]
    assert [job.version for job in moved] == [job.version + 1 for job in before[1:]]
    assert [event.reason for event in place.service.events(waiting[1].id, 50, None)[0]] == ["Submitted", "WaitingForRoom"]
    assert place.service.job(first.id).state is JobState.STARTING
