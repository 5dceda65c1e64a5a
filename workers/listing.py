"""What storage holds, listed for one recovery.

Invariants: an answer that comes when the group is past its question is dropped, for it tells of another time; storage that never answers
holds up no later question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.checkpoint.background import in_thread
from workers.checkpoint.catalog import CheckpointRef, catalog, ever_committed, newest_generation, sweep
from workers.checkpoint.lease import Fenced, Lease, claim
from workers.checkpoint.tree import StateError
from workers.group import Doing, Group
from workers.messages import CheckpointFound, GroupSpec, Problem, Unfit

READ_S = 30.0  # storage that has not listed its checkpoints by then is asked again
USED_IN = frozenset({Doing.LOCATING, Doing.STAGING, Doing.FETCHING})


@dataclass
class Listing:
    """``found``: None where nothing was read for this recovery; ``refused``: why this attempt may not use the folder."""

    spec: GroupSpec
    group: Callable[[], Group]
    found: tuple[CheckpointFound, ...] | None = None
    problem: str | None = None
    past_generation: int = -1
    refused: str | None = None

    def keep_up(self) -> None:
        """Called after each decision: what was listed is good for this recovery only."""
        if self.group().doing not in USED_IN:
            self.found = self.problem = None

    async def read(self, asked_at: float) -> None:
        """Raises nothing."""
        found, past, refused, problem = None, -1, None, None
        try:
            found, past = await in_thread(read_catalog, self.spec, self.group().generation, limit_s=READ_S)
        except Fenced as error:
            refused = str(error)
        except TimeoutError:
            problem = f"{self.spec.storage_url} did not answer within {READ_S:.0f} s"
        except Exception as error:
            problem = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
        group = self.group()
        if group.doing is Doing.LOCATING and group.since == asked_at:
            self.found, self.refused, self.problem = found, refused, problem
            self.past_generation = max(self.past_generation, past)


def read_catalog(spec: GroupSpec, generation: int) -> tuple[tuple[CheckpointFound, ...], int]:
    """(checkpoints in the job's folder, newest first; the newest generation of this attempt that left anything there, -1: none).

    Takes the folder for this attempt, so that an earlier one commits nothing from now on. A folder without a manifest is a write that never
    ended; those of earlier attempts and generations are removed. It counts as damaged only where some checkpoint was once whole and none is
    now: then it may be all that is left, and nothing is removed or started from zero. What another job has written is not taken. Raises
    Fenced, OSError.
    """
    past = newest_generation(spec.storage_url, spec.attempt)
    claim(spec.storage_url, Lease(spec.job_id, spec.attempt, max(generation, past)))
    found = [_ours(c, spec.job_id) for c in catalog(spec.storage_url)]
    whole = any(c.problem is None for c in found)
    if whole or not ever_committed(spec.storage_url):
        sweep(spec.storage_url, spec.attempt, max(generation, past))
        found = [c for c in found if c.manifest or whole]  # those are told once more, as skipped
    return tuple(CheckpointFound(c.url, c.step, c.problem, c.finite) for c in found), past


def _ours(found: CheckpointRef, job_id: str) -> CheckpointRef:
    if found.problem is not None or found.job_id == job_id:
        return found
    return replace(found, problem=Problem(Unfit.DAMAGED, f"it was written by job {found.job_id} and copied here; remove it"))
