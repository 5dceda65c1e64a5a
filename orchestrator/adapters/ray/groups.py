"""Groups of Ray actors: one placement group and one coordinator per attempt, named by job and attempt.

Invariants: every call may be repeated; nothing is found or removed but by the names that this module gives; a group counts as absent only
when Ray itself says that neither its coordinator nor its placement group exists.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.adapters.ray.session import NAMESPACE, answer
from orchestrator.core.model import GroupView, Presence
from orchestrator.ports import LeaseLost, Unavailable
from workers.messages import GroupSpec, StaleServer
from workers.processes import sweep

REPORT_S = 2.0
CLOSE_S = 15.0
ON_HEAD = {"node:__internal_head__": 0.0001}  # where it ends with Ray itself only; of a soft affinity Ray takes no notice
_GIB = 2**30
_OURS = re.compile(r"(job-[a-z2-7]{12})\.(\d+)\.")


def key_of(job_id: str, attempt: int) -> str:
    return f"{job_id}.{attempt}"


class RayGroups:
    """Implements orchestrator.ports.Groups over the connection of adapters.ray.session. ``wake`` is set when a group that was observed has
    news, so that nobody needs to poll often."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._awaited: dict[tuple[str, int], tuple[Any, int]] = {}  # by group: the call that answers with its news, the news seen before

    def observe(self, keys: Sequence[tuple[str, int]], fence: int | None) -> dict[tuple[str, int], GroupView]:
        return answer(lambda: self._observe(keys, fence), REPORT_S + 3.0)

    def _observe(self, keys: Sequence[tuple[str, int]], fence: int | None) -> dict[tuple[str, int], GroupView]:
        import ray

        views: dict[tuple[str, int], GroupView] = {}
        asked: dict[Any, tuple[str, int]] = {}
        coordinators: dict[tuple[str, int], Any] = {}
        for key in keys:
            coordinator = self._coordinator(key_of(*key))
            if coordinator is not None:
                asked[coordinator.report.remote(fence)] = key
                coordinators[key] = coordinator
            else:
                placed = self._placement_group(key_of(*key)) is not None
                views[key] = GroupView(Presence.SILENT if placed else Presence.ABSENT)
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REPORT_S) if asked else ([], [])
        for ref, key in asked.items():
            views[key] = GroupView(Presence.SILENT)
            if ref in done:
                with contextlib.suppress(ray.exceptions.RayError), _fenced():
                    views[key] = GroupView(Presence.PRESENT, ray.get(ref))
        self._await_news({key: coordinator for key, coordinator in coordinators.items() if views[key].presence is Presence.PRESENT})
        return views

    def _await_news(self, coordinators: dict[tuple[str, int], Any]) -> None:
        import ray

        awaited: dict[tuple[str, int], tuple[Any, int]] = {}
        for key, coordinator in coordinators.items():
            ref, seen = self._awaited.get(key, (None, -1))
            if ref is not None and not ray.wait([ref], timeout=0)[0]:
                awaited[key] = (ref, seen)
                continue
            try:
                seen = seen if ref is None else ray.get(ref)
            except ray.exceptions.RayError:
                continue  # another coordinator leads now and counts anew; it is asked on the next look
            ref = coordinator.news.remote(seen)
            ref.future().add_done_callback(lambda _: self._wake.set())
            awaited[key] = (ref, seen)
        self._awaited = awaited

    def existing(self) -> set[tuple[str, int]]:
        """(job id, attempt) of every group of which anything exists in Ray."""
        return answer(self._existing)

    def _existing(self) -> set[tuple[str, int]]:
        from ray.util.placement_group import placement_group_table

        names = _actor_names()
        names += [str(p["name"]) + "." for p in placement_group_table().values() if p["state"] != "REMOVED"]
        return {(match[1], int(match[2])) for name in names if (match := _OURS.match(name))}

    def create(self, spec: GroupSpec, fence: int) -> None:
        answer(lambda: self._create(spec, fence), 10.0)

    def _create(self, spec: GroupSpec, fence: int) -> None:
        import ray
        from ray.util.placement_group import placement_group

        from workers.agents import NodeGone, make_agent
        from workers.coordinator import Coordinator, coordinator_name

        if self._placement_group(spec.key) is None:
            bundle: dict[str, float] = {"CPU": spec.cpus_per_node, "memory": int(spec.memory_gb * _GIB)}
            if spec.gpus_per_node:
                bundle["GPU"] = spec.gpus_per_node
            placement_group(
                [bundle] * len(spec.nodes),
                name=spec.key,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": node.node_id} for node in spec.nodes],
            )
        ray.remote(Coordinator).options(
            name=coordinator_name(spec.key),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=ON_HEAD,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=1000,
        ).remote(spec, fence)
        for node in spec.nodes:  # the coordinator would make them, but only once its own process has started
            with contextlib.suppress(NodeGone):
                make_agent(spec, node.index)

    def end(self, job_id: str, attempt: int, grace_s: float, fence: int) -> None:
        def ask() -> None:
            import ray

            coordinator = self._coordinator(key_of(job_id, attempt))
            if coordinator is not None:
                with contextlib.suppress(ray.exceptions.RayError), _fenced():
                    ray.get(coordinator.end.remote(grace_s, fence), timeout=REPORT_S)

        answer(ask, REPORT_S + 2.0)

    def drill(self, job_id: str, attempt: int, fault: str, rank: int) -> str:
        def ask() -> str:
            import ray

            coordinator = self._coordinator(key_of(job_id, attempt))
            if coordinator is None:
                raise ValueError("the job's group does not exist now")
            try:
                return str(ray.get(coordinator.drill.remote(fault, rank), timeout=REPORT_S))
            except ray.exceptions.RayTaskError as error:
                raise ValueError(str(error.cause)) from None
            except ray.exceptions.RayError as error:
                raise Unavailable(f"the coordinator did not answer: {error}") from error

        return answer(ask, REPORT_S + 2.0)

    def remove(self, job_id: str, attempt: int, fence: int) -> bool:
        return answer(lambda: self._remove(key_of(job_id, attempt), fence), CLOSE_S + 25.0)

    def _remove(self, key: str, fence: int) -> bool:
        import ray
        from ray.util.placement_group import placement_group_table, remove_placement_group

        coordinator = self._coordinator(key)
        clean = False
        if coordinator is not None:
            with contextlib.suppress(ray.exceptions.RayError), _fenced():
                clean = not ray.get(coordinator.close.remote(fence), timeout=CLOSE_S)
        placed = self._placement_group(key)
        nodes: set[str] = set()
        if placed is not None:
            nodes = set((placement_group_table(placed).get("bundles_to_node_id") or {}).values()) - {""}
        if coordinator is not None:
            ray.kill(coordinator)
        for actor in self._agents(key):
            ray.kill(actor)
        if placed is not None:
            remove_placement_group(placed)
        if not clean:
            self._sweep(key, nodes)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if self._coordinator(key) is None and not self._agents(key) and self._placement_group(key) is None:
                return True
            time.sleep(0.05)
        return False

    def _sweep(self, key: str, nodes: set[str]) -> None:
        """End processes and free shared memory where no agent could do it; all living nodes when it is not known which they were."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        living = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
        task = ray.remote(sweep)
        swept = {
            task.options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(key): node
            for node in sorted(nodes & living or living)
        }
        done, late = ray.wait(list(swept), num_returns=len(swept), timeout=15.0) if swept else ([], [])
        left = {swept[ref]: pids for ref in done if (pids := ray.get(ref))}
        problems = [f"processes {pids} on node {node[:8]} do not end" for node, pids in left.items()]
        problems += [f"node {swept[ref][:8]} did not sweep in time" for ref in late]
        if problems:
            raise Unavailable("; ".join(problems))

    def _coordinator(self, key: str) -> Any | None:
        from workers.coordinator import coordinator_name

        return _actor(coordinator_name(key))

    def _agents(self, key: str) -> list[Any]:
        """Living agents of the group."""
        found = [_actor(name) for name in _actor_names() if name.startswith(f"{key}.agent.")]
        return [actor for actor in found if actor is not None]

    def _placement_group(self, key: str) -> Any | None:
        import ray

        with contextlib.suppress(ValueError):
            return ray.util.get_placement_group(key)
        return None


@contextlib.contextmanager
def _fenced() -> Iterator[None]:
    """Turns a coordinator's refusal of this server into LeaseLost."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, StaleServer):
            raise LeaseLost(str(error.cause)) from None
        raise


def _actor_names() -> list[str]:
    import ray

    return [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]


def _actor(name: str) -> Any | None:
    import ray

    with contextlib.suppress(ValueError):
        return ray.get_actor(name, namespace=NAMESPACE)
    return None
