"""PURE: what a coordinator does next. ``decide(group, seen, now)`` gives the new state, actions, a reason and when to look again.

Invariants: acts on state, never on a message; actions are idempotent and repeated until their effect is seen; a generation is launched
only when no process of an earlier one lives on any node; an outcome, once given, never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workers.ending import STOP_LIMIT_S, close_group, closing, end, ended, finish, lose_group
from workers.failing import (
    LAUNCH_S,
    agent_verdict,
    changed_agent,
    fail,
    launch_timeout,
    lose_for,
    node_of,
    not_ready,
    start_problem,
    start_timeout,
)
from workers.group import (
    AGENT_RETURN_S,
    REPEAT_S,
    Action,
    Decision,
    Doing,
    FetchPeers,
    Group,
    Launch,
    ReadCatalog,
    Seen,
    Stage,
    StopRanks,
    TakeStacks,
    TerminateRanks,
    Unstage,
    all_stopped,
    gone_agents,
    ranks_of,
)
from workers.hangs import judge_hang
from workers.incidents import now_training, put
from workers.locating import POISONED, from_peers, leave_poisoned, newest_generation, pass_over, whole_in_memory, without_storage
from workers.messages import CheckpointFound, FailureClass, Outcome, RankReport, RestoreOrder, Source, Unfit
from workers.verdict import failed, judge, judge_metrics, judge_success, judge_unseen_files, only_secondary, secondary
from workers.watching import Silence, has_served, settled, silence, tell_nonfinite, training_since

CULPRIT_S = 0.3  # how long to wait for the culprit while only consequences were seen
PLACING_S = 120.0
TOLD_S = 60.0  # for other nodes to tell whether they have the problem of one
FILES_S = 60.0  # for storage to tell which files that success asks for are there
STACKS_S = 2.0  # a hang is acted on after this long, with the stacks that have come by then


def decide(group: Group, seen: Seen, now: float) -> Decision:
    """One decision. ``now`` is Unix time in seconds."""
    group = _remember(group, seen)
    if seen.end is not None and group.end is None and group.doing not in (Doing.CLOSING, Doing.ENDED):
        group = replace(group, end=seen.end)
    if group.end is not None and group.doing in _ENDS_AT_ONCE:
        group = group.say(now, "EndRequested", "no generation trains: ending at once")
        group = group.close(now, Outcome.STOPPED, "Stopped", "ended on request")
    lost = next((a for a in seen.agents if a.node_lost), None)
    if lost is not None and group.doing in _WITHOUT_RANKS:
        node = node_of(group, lost.index)
        gone = f"node {node} has left the cluster; the job needs another placement"
        return lose_for(group, now, agent_verdict(group, lost, now), node, "NodeLost", gone)
    return _HANDLERS[group.doing](group, seen, now)


def _remember(group: Group, seen: Seen) -> Group:
    """Keep the newest rank reports and the best step."""
    ranks = ranks_of(group, seen)
    if not ranks:
        return group
    steps = [r.step for r in ranks if r.step]
    best = max([*steps, group.best_step or 0]) or None
    attached = group.attached or any(r.attached for r in ranks)
    slowest = max((r.step_slowest for r in ranks if r.step_slowest is not None), default=group.step_slowest)
    return replace(group, ranks=ranks, best_step=best, attached=attached, step_slowest=slowest)


def _place(group: Group, seen: Seen, now: float) -> Decision:
    if all(a.status is not None and a.missing_since is None for a in seen.agents):
        return decide(group.go(Doing.WARMING, now), seen, now)
    if now - group.since > PLACING_S:
        silent = [a.index for a in seen.agents if a.status is None or a.missing_since is not None]
        return lose_group(group, now, "PlacingTimeout", f"agents {silent} did not answer within {PLACING_S:.0f} s")
    return Decision(group, (), "WaitingForAgents", group.since + PLACING_S)


def _warm(group: Group, seen: Seen, now: float) -> Decision:
    gone = gone_agents(seen, now)
    if gone and now - group.since > AGENT_RETURN_S:
        return lose_group(group, now, "NodeLost", f"agent {gone[0].index} on node {node_of(group, gone[0].index)} is gone")
    problem = start_problem(seen, now)
    all_told = all(a.status is not None and (a.status.ready or a.status.problem) for a in seen.agents)
    if problem is not None and (all_told or problem.kind == FailureClass.USER or now - group.since > TOLD_S):
        return not_ready(group, seen, now, problem)
    if not gone and all(a.status is not None and a.status.ready for a in seen.agents):
        return decide(group.go(Doing.LOCATING, now), seen, now)
    if not gone and now - group.since > group.spec.start_s:
        return not_ready(group, seen, now, start_timeout(group, now))
    return Decision(group, (), "Warming", now + REPEAT_S)


def _locate(group: Group, seen: Seen, now: float) -> Decision:
    if gone_agents(seen, now):
        return decide(group.go(Doing.WARMING, now), seen, now)
    if not all_stopped(seen):
        return _not_stopped(group, seen, now)
    newest = without_storage(group, seen)
    if group.roll_back is not None and (newest.step if newest is not None else group.checkpoint_step or 0) >= group.roll_back:
        return _roll_back(group, seen, now, group.roll_back)
    if newest is not None and newest.step >= (group.checkpoint_step or 0):
        return _take(group, seen, now, newest)
    if seen.refused is not None:
        return close_group(group, now, Outcome.FAILED, "StorageRefused", seen.refused)
    if seen.catalog is None:
        if now - group.since > LAUNCH_S:
            return _storage_away(group, seen, now, f"storage cannot be used: {seen.catalog_problem or 'no answer'}")
        return Decision(group, (ReadCatalog(group.since),), "ReadingCatalog", now + REPEAT_S)
    return _from_storage(group, seen, now, seen.catalog, newest)


def _from_storage(group: Group, seen: Seen, now: float, catalog: tuple[CheckpointFound, ...], newest: RestoreOrder | None) -> Decision:
    """The newest checkpoint that is not damaged, unless memory holds a state as new (``newest``)."""
    group = leave_poisoned(group, now, catalog)
    barred = group.barred
    left = [c for c in catalog if c.url not in barred]
    sound = [c for c in left if c.problem is None or c.problem.why is not Unfit.DAMAGED]
    if newest is not None and not any(c.step > newest.step for c in sound):
        return _take(group, seen, now, newest)
    for c in left[: left.index(sound[0])] if sound else ():
        group = pass_over(group, now, c)
    if sound and sound[0].problem is not None:
        return _unfit(group, seen, now, sound[0], ReadCatalog(group.since))
    if sound:
        group = replace(group, restore=RestoreOrder(Source.STORAGE, sound[0].step, sound[0].url))
        return decide(group.go(Doing.STAGING, now), seen, now)
    bad = [*group.excluded, *left]
    if bad:
        listed = "; ".join(f"step {c.step}: {c.problem}" for c in bad[:10])
        message = f"no checkpoint can be restored, and starting from zero would lose all steps: {listed}"
        return close_group(group, now, Outcome.FAILED, "NoValidCheckpoint", message)
    committed = max([group.spec.committed_step, *(c.step for c in group.checkpoints)])
    if committed:
        message = f"storage holds no checkpoint, though one of step {committed} was committed; put it back, or submit the job anew"
        return close_group(group, now, Outcome.FAILED, "NoValidCheckpoint", message)
    if group.best_step:
        group = group.say(now, "StartedFromZero", f"no snapshot and no checkpoint exists; {group.best_step} steps are done again")
    return _launch_from(group, seen, now, RestoreOrder(Source.NONE, 0))


def _unfit(group: Group, seen: Seen, now: float, found: CheckpointFound, again: Action) -> Decision:
    """The checkpoint that should be taken is not damaged, but cannot be had: an older one would lose steps that are there."""
    assert found.problem is not None
    why = f"step {found.step} at {found.url}: {found.problem}"
    if found.problem.why is Unfit.UNSUITED:
        return close_group(group, now, Outcome.FAILED, "UnsuitedCheckpoint", why)
    if found.problem.why is Unfit.NO_ROOM:
        return lose_group(group, now, "NoRoomForCheckpoint", why)
    if group.away_since is None:
        text = f"{why}; it is asked for again for {LAUNCH_S:.0f} s. Remove it where it cannot be read for good"
        group = replace(group, away_since=now).say(now, "CheckpointUnreadable", text)
    if now - (group.away_since or now) > LAUNCH_S:
        return _storage_away(group, seen, now, why)
    return Decision(group, (again,), "CheckpointUnreadable", now + REPEAT_S)


def _roll_back(group: Group, seen: Seen, now: float, since: int) -> Decision:
    """To the newest checkpoint from before the metrics were not finite; where there is none, as after any other failure."""
    if seen.catalog is None and seen.refused is None and now - group.since <= LAUNCH_S:
        return Decision(group, (ReadCatalog(group.since),), "ReadingCatalog", now + REPEAT_S)
    barred = group.barred
    left = [c for c in seen.catalog or () if c.url not in barred]
    earlier = [c for c in left if c.problem is None and c.finite and c.step < since]
    if not earlier:
        return decide(replace(group, roll_back=None), seen, now)
    taken = earlier[0]
    group = group.say(now, "RolledBack", f"metrics are not finite since step {since}: back to the checkpoint of step {taken.step}")
    poisoned = tuple(replace(c, problem=POISONED) for c in left if c.step >= since)
    restore = RestoreOrder(Source.STORAGE, taken.step, taken.url)
    return decide(replace(group.go(Doing.STAGING, now), excluded=group.excluded + poisoned, restore=restore), seen, now)


def _storage_away(group: Group, seen: Seen, now: float, why: str) -> Decision:
    """Memory may hold an older state; another attempt would need storage too."""
    newest = without_storage(group, seen)
    if newest is None:
        return lose_group(group, now, "StorageUnavailable", why)
    group = group.say(now, "StorageUnavailable", f"{why}; step {newest.step} from the nodes' memory is taken instead")
    return _take(group, seen, now, newest)


def _take(group: Group, seen: Seen, now: float, newest: RestoreOrder) -> Decision:
    if newest.source == Source.MEMORY:
        return _launch_from(group, seen, now, newest)
    return decide(replace(group.go(Doing.FETCHING, now), restore=newest), seen, now)


def _fetch(group: Group, seen: Seen, now: float) -> Decision:
    """Nodes make the snapshots of one step whole from each other's; what cannot be had makes the next best state the one to take."""
    restore = group.restore
    assert restore is not None
    step = restore.step
    if gone_agents(seen, now):
        return decide(group.go(Doing.WARMING, now), seen, now)
    if not all_stopped(seen):
        return decide(group.go(Doing.LOCATING, now), seen, now)
    if whole_in_memory(group, seen, step):
        group = group.say(now, "PeerStateTaken", f"step {step} is whole again, by copies from other nodes' memory")
        return _launch_from(group, seen, now, restore)
    problems = [f"node {a.index}: {a.status.unfetched[step]}" for a in seen.agents if a.status and step in a.status.unfetched]
    peers = from_peers(group, seen)
    if peers is not None and peers.step > step:
        return decide(group.go(Doing.LOCATING, now), seen, now)
    if now - group.since > group.spec.start_s:
        problems.append(f"not done within start_s = {group.spec.start_s:.0f} s")
    elif peers is None or peers.step != step:
        problems.append("a copy is gone")
    if problems:
        group = group.say(now, "PeerStateFailed", f"step {step} cannot be had from other nodes' memory: {problems[0]}")
        return decide(replace(group.go(Doing.LOCATING, now), unfetched=(*group.unfetched, step)), seen, now)
    assert peers is not None
    return Decision(group, (FetchPeers(step, peers.fetches),), "FetchingFromPeers", now + REPEAT_S)


def _stage(group: Group, seen: Seen, now: float) -> Decision:
    restore = group.restore
    assert restore is not None
    assert restore.url is not None
    url = restore.url
    if gone_agents(seen, now):
        return decide(group.go(Doing.WARMING, now), seen, now)
    if not all_stopped(seen):
        return decide(group.go(Doing.LOCATING, now), seen, now)
    answers = {a.index: a.status.staged[url] for a in seen.agents if a.status and url in a.status.staged}
    problem = min((p for p in answers.values() if p is not None), key=lambda p: list(Unfit).index(p.why), default=None)
    if problem is not None:
        found = CheckpointFound(url, restore.step, problem)
        if problem.why is not Unfit.DAMAGED:
            return _unfit(group, seen, now, found, Stage(url))
        return decide(pass_over(group, now, found).go(Doing.LOCATING, now), seen, now)
    if len(answers) == len(seen.agents):
        return _launch_from(group, seen, now, restore)
    if now - group.since > group.spec.start_s:
        return _storage_away(group, seen, now, f"{url} was not read within start_s = {group.spec.start_s:.0f} s")
    return Decision(group, (Stage(url),), "ReadingCheckpoint", now + REPEAT_S)


def _launch_from(group: Group, seen: Seen, now: float, restore: RestoreOrder) -> Decision:
    recovery = group.recovery
    if recovery is not None:
        incident = recovery.incident
        lost = None if incident.last_step is None else max(0, incident.last_step - restore.step)
        resumed = restore.step if incident.last_step is not None else None
        source = restore.source if incident.last_step is not None else Source.NONE
        recovery = replace(recovery, incident=replace(incident, restored_from=source, resumed_step=resumed, lost_steps=lost))
        group = put(group, recovery.incident)
    elif restore.source == Source.STORAGE:
        group = group.say(now, "Restoring", f"resuming from the checkpoint of step {restore.step}")
    group = replace(
        group.go(Doing.LAUNCHING, now),
        generation=newest_generation(group, seen) + 1,
        restore=restore,
        recovery=recovery,
        training=False,
        unfetched=(),
        nonfinite=(),
        roll_back=None,
        mirrored=group.mirrored if group.mirrored is not None and group.mirrored <= restore.step else None,
        incarnations={a.index: a.status.incarnation for a in seen.agents if a.status},
    )
    return _launch(group, seen, now)


def _launch(group: Group, seen: Seen, now: float) -> Decision:
    assert group.restore is not None
    away = changed_agent(group, seen, now)
    if away is not None:
        return fail(group, seen, now, agent_verdict(group, away, now))
    if all(a.status and a.status.generation == group.generation for a in seen.agents):
        return decide(group.go(Doing.TRAINING, now), seen, now)
    problem = start_problem(seen, now)
    if problem is not None:
        return fail(group, seen, now, problem)
    if now - group.since > LAUNCH_S:
        return fail(group, seen, now, launch_timeout(now))
    await_step = max(group.best_step or 0, group.restore.step) + 1
    return Decision(group, (Launch(group.generation, group.restore, await_step),), "Launching", now + REPEAT_S)


def _train(group: Group, seen: Seen, now: float) -> Decision:
    ranks = tuple(settled(r, now) for r in ranks_of(group, seen))
    end = group.end
    if end is not None and any(r.ended_at is None for r in ranks):
        group = group.say(now, "EndRequested", f"SIGTERM to all ranks, SIGKILL after {end.grace_s:.0f} s").go(Doing.ENDING, now)
        return Decision(group, (TerminateRanks(group.generation),), "EndRequested", now + end.grace_s)
    away = changed_agent(group, seen, now)
    verdict = judge(ranks)
    if away is not None and (verdict is None or all(secondary(r) for r in ranks if failed(r))):
        return fail(group, seen, now, agent_verdict(group, away, now))
    if verdict is not None:
        if only_secondary(ranks) and now - verdict.at < CULPRIT_S:
            return Decision(group, (), "WaitingForCulprit", verdict.at + CULPRIT_S)
        return fail(group, seen, now, verdict)
    if len(ranks) == group.spec.world_size and all(r.exit_code == 0 for r in ranks):
        return _all_left(group, seen, ranks, now)
    if len(ranks) < group.spec.world_size and now - group.since > LAUNCH_S:
        return fail(group, seen, now, launch_timeout(now))
    group = tell_nonfinite(group, ranks, now)
    poisoned = judge_metrics(ranks) if group.spec.stop_on_nan else None
    if poisoned is not None:
        return fail(group, seen, now, poisoned)
    silent, hang_at = silence(group, seen, ranks, now)
    if silent is not None:
        return _hang(group, seen, now, ranks, silent)
    group = replace(group, stacks_asked_at=None)
    freed = (Unstage(),) if any(a.status and a.status.staged for a in seen.agents) and has_served(group, ranks) else ()
    if not group.training:
        ready_at = training_since(group, ranks, now)
        if ready_at is not None and ready_at <= now:
            group = now_training(group, ranks, now)
        else:
            return Decision(group, freed, "WaitingForFirstStep", min(t for t in (ready_at, hang_at, now + 60.0) if t is not None))
    return Decision(group, freed, "Training", hang_at)


def _all_left(group: Group, seen: Seen, ranks: tuple[RankReport, ...], now: float) -> Decision:
    """Every rank has ended with 0 by itself; whether that is success, the spec may want to know more exactly."""
    spec = group.spec
    looked = [a.status.missing_files for a in seen.agents if a.status and a.status.missing_files is not None]
    missing = tuple(f for f in spec.success_files if all(f in names for names in looked))
    unknown = missing and len(looked) < len(seen.agents)
    if unknown and now - max(r.ended_at or now for r in ranks) <= FILES_S and not gone_agents(seen, now):
        return Decision(group, (), "LookingForFiles", now + REPEAT_S)
    unfinished = judge_unseen_files(missing, now) if unknown else judge_success(ranks, spec.success_steps, missing, now)
    if unfinished is not None:
        return fail(group, seen, now, unfinished)
    if not group.training:
        group = now_training(group, ranks, now)
    return decide(group.go(Doing.FINISHING, now), seen, now)


def _hang(group: Group, seen: Seen, now: float, ranks: tuple[RankReport, ...], silent: Silence) -> Decision:
    """Evidence first: the stacks of all ranks, for a short while; then the end of the generation."""
    asked_at = group.stacks_asked_at or now
    group = replace(group, stacks_asked_at=asked_at)
    waiting = [a for a in seen.agents if a.status is not None and a.status.stacks_of != asked_at]
    if waiting and now - asked_at < STACKS_S:
        return Decision(group, (TakeStacks(asked_at),), "TakingStacks", asked_at + STACKS_S)
    stacks = {s.rank: s for a in seen.agents if a.status is not None and a.status.stacks_of == asked_at for s in a.status.stacks}
    return fail(group, seen, now, judge_hang(ranks, stacks, silent.said, silent.since))


def _stop(group: Group, seen: Seen, now: float) -> Decision:
    """Ranks are being ended; a dead agent is awaited."""
    gone = gone_agents(seen, now)
    if gone and now - group.since > AGENT_RETURN_S:
        node = node_of(group, gone[0].index)
        return lose_group(group, now, "NodeLost", f"agent {gone[0].index} on node {node} did not come back within {AGENT_RETURN_S:.0f} s")
    if gone or not all_stopped(seen):
        stuck = [pid for a in seen.agents if a.status for pid in a.status.stuck]
        if stuck and now - group.since > AGENT_RETURN_S:
            return lose_group(group, now, "ProcessesStuck", f"processes {stuck} do not end on SIGKILL; their node needs a restart")
        return _not_stopped(group, seen, now)
    if group.recovery is not None and group.recovery.stopped_at is None:
        group = replace(group, recovery=replace(group.recovery, stopped_at=now))
    if group.not_before is not None and now < group.not_before:
        return Decision(group, (), "BackingOff", group.not_before)
    if not all(a.status and a.status.ready for a in seen.agents):
        return decide(group.go(Doing.WARMING, now), seen, now)
    return decide(group.go(Doing.LOCATING, now), seen, now)


def _not_stopped(group: Group, seen: Seen, now: float) -> Decision:
    """The order is repeated; an agent that answers and has not done it for long never will."""
    if now - group.since > STOP_LIMIT_S:
        left = [node_of(group, a.index) for a in seen.agents if not (a.status and a.status.stopped)]
        return lose_group(group, now, "ProcessesStuck", f"nodes {left} have not ended their ranks within {STOP_LIMIT_S:.0f} s")
    return Decision(group, (StopRanks(group.generation),), "StoppingRanks", now + REPEAT_S)


_WITHOUT_RANKS = frozenset({Doing.PLACING, Doing.WARMING, Doing.LOCATING, Doing.STAGING, Doing.FETCHING, Doing.STOPPING})
_ENDS_AT_ONCE = frozenset({Doing.PLACING, Doing.WARMING, Doing.LOCATING, Doing.STAGING, Doing.FETCHING, Doing.LAUNCHING, Doing.STOPPING})
_HANDLERS: dict[Doing, Callable[[Group, Seen, float], Decision]] = {
    Doing.PLACING: _place,
    Doing.WARMING: _warm,
    Doing.LOCATING: _locate,
    Doing.STAGING: _stage,
    Doing.FETCHING: _fetch,
    Doing.LAUNCHING: _launch,
    Doing.TRAINING: _train,
    Doing.STOPPING: _stop,
    Doing.FINISHING: finish,
    Doing.ENDING: end,
    Doing.CLOSING: closing,
    Doing.ENDED: ended,
}
