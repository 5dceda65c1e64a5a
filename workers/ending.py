"""PURE: how a group ends: the final checkpoint, the grace after SIGTERM, and the end of whatever is left.

Invariant: an outcome, once given, never changes; a group has ENDED only when nothing of it runs on a node that answers.
"""

from __future__ import annotations

from dataclasses import replace

from workers.group import (
    AGENT_RETURN_S,
    REPEAT_S,
    Decision,
    Doing,
    Group,
    SaveFinal,
    Seen,
    StopRanks,
    TerminateRanks,
    gone_agents,
    ranks_of,
)
from workers.incidents import RELAUNCH, put, turned
from workers.messages import Outcome, RankPhase, RankReport

FINAL_SAVE_S = 900.0
STOP_LIMIT_S = 120.0  # an agent that answers and has not ended its ranks by then never will; who removes the group ends them


def finish(group: Group, seen: Seen, now: float) -> Decision:
    if seen.final_saved and seen.final_problem is not None:
        group = group.say(now, "FinalCheckpointFailed", seen.final_problem)
        message = f"all ranks ended with 0, the final checkpoint could not be written: {seen.final_problem}"
        return close_group(group, now, Outcome.SUCCEEDED, "Completed", message)
    if seen.final_saved:
        if group.best_step is None and not group.checkpoints and group.spec.success_steps is None and not group.spec.success_files:
            text = "all ranks ended with 0; the job reported no step and made no checkpoint: `success` in the spec tells how to check it"
            group = group.say(now, "FinishedWithoutProgress", text)
        message = "the rank ended with 0" if group.spec.world_size == 1 else f"all {group.spec.world_size} ranks ended with 0"
        return close_group(group, now, Outcome.SUCCEEDED, "Completed", message)
    left = any(a.node_lost for a in seen.agents) or (gone_agents(seen, now) and now - group.since > AGENT_RETURN_S)
    if left or now - group.since > FINAL_SAVE_S:
        why = "a node with a part of the last state is gone" if left else f"not written within {FINAL_SAVE_S:.0f} s"
        group = group.say(now, "FinalCheckpointFailed", why)
        return close_group(group, now, Outcome.SUCCEEDED, "Completed", "all ranks ended with 0, the final checkpoint could not be written")
    return Decision(group, (SaveFinal(group.generation),), "WritingFinalCheckpoint", now + REPEAT_S)


def end(group: Group, seen: Seen, now: float) -> Decision:
    asked = group.end
    assert asked is not None
    ranks = ranks_of(group, seen)
    all_ended = len(ranks) == group.spec.world_size and all(r.ended_at is not None for r in ranks)
    if all_ended or now >= group.since + asked.grace_s:
        if all_ended:
            group = group.say(now, "RanksEnded", f"all ranks ended within the {asked.grace_s:g} s of grace")
        else:
            group = group.say(now, "GraceOver", f"ranks still ran after {asked.grace_s:g} s of grace: SIGKILL")
        return close_group(_tell_unsaved(group, ranks, now), now, Outcome.STOPPED, "Stopped", "ended on request")
    return Decision(group, (TerminateRanks(group.generation),), "GraceRunning", min(now + REPEAT_S, group.since + asked.grace_s))


def _tell_unsaved(group: Group, ranks: tuple[RankReport, ...], now: float) -> Group:
    """Ranks that had SIGTERM and left no state of their newest step."""
    unsaved = [r for r in ranks if (r.phase is not RankPhase.DONE if r.attached else r.exit_code != 0)]
    if not unsaved:
        return group
    first = unsaved[0]
    where = f"rank {first.rank} was at step {first.step or 0}, phase {first.phase}" if first.attached else "it reports no steps"
    kept = f"the newest checkpoint is of step {group.checkpoint_step}" if group.checkpoint_step else "there is no checkpoint"
    who = f"ranks {', '.join(str(r.rank) for r in unsaved[:8])}"
    return group.say(now, "NoSaveWithinGrace", f"{who} did not end by themselves with their state saved: {where}; {kept}", first.rank)


def lose_group(group: Group, now: float, reason: str, message: str) -> Decision:
    if group.recovery is not None:
        group = put(group, turned(group.recovery.incident, RELAUNCH, f"{message}; another attempt follows"))
    return close_group(group.say(now, reason, message), now, Outcome.LOST, reason, message)


def close_group(group: Group, now: float, outcome: Outcome, reason: str, message: str) -> Decision:
    group = group.close(now, outcome, reason, message)
    return Decision(group, (StopRanks(group.generation),), reason, now + REPEAT_S)


def closing(group: Group, seen: Seen, now: float) -> Decision:
    present = [a for a in seen.agents if a.status is not None and a not in gone_agents(seen, now)]
    patient = now - group.since <= AGENT_RETURN_S
    late = now - group.since > STOP_LIMIT_S
    if late or all(a.status and (a.status.stopped or (a.status.stuck and not patient)) for a in present):
        outcome = group.outcome
        assert outcome is not None
        group = replace(group.go(Doing.ENDED, now), ended_at=_ended_at(group, now))
        return Decision(group.say(now, outcome.capitalize(), group.message), (), group.reason)
    return Decision(group, (StopRanks(group.generation),), "StoppingRanks", now + REPEAT_S)


def _ended_at(group: Group, now: float) -> float:
    """When the last rank ended, which may be long before a returning control plane hears of it."""
    ends = [r.ended_at for r in group.ranks if r.ended_at is not None]
    return max(ends) if ends and len(ends) == len(group.ranks) else now


def ended(group: Group, seen: Seen, now: float) -> Decision:
    return Decision(group, (), group.reason)
