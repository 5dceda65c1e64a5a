"""Puts the parts of a server together: store, groups, nodes, service, reconciler, storage.

Invariants: adapters are imported here and nowhere above; closing takes everything down again in reverse order and leaves jobs alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from orchestrator.adapters.storage.bundles import Bundles
from orchestrator.adapters.storage.checkpoints import StoredCheckpoints
from orchestrator.adapters.storage.logs import LogStore
from orchestrator.clock import SystemClock
from orchestrator.core.group_spec import Roots, storage_url
from orchestrator.core.lifecycle import taken_down
from orchestrator.core.model import Job
from orchestrator.ports import Clock, Groups, Nodes, Store, Unavailable
from orchestrator.reconciler import Reconciler
from orchestrator.service import Service
from orchestrator.settings import Settings, SettingsError

log = logging.getLogger(__name__)
STOP_S = 5.0  # for the pass under way, which may be waiting for a cluster that does not answer


@dataclass(frozen=True)
class Control:
    """The parts of a running server that the API needs."""

    service: Service
    reconciler: Reconciler
    store: Store
    bundles: Bundles
    roots: Roots
    clock: Clock

    def logs_of(self, job: Job) -> LogStore:
        return LogStore(storage_url(job.id, job.spec, self.roots))


def roots(storage: str) -> Roots:
    """Folders below the storage setting."""
    base = storage.rstrip("/")
    return Roots(jobs=f"{base}/jobs", bundles=f"{base}/bundles")


def assemble(store: Store, groups: Groups, nodes: Nodes, clock: Clock, storage: str, wake: threading.Event) -> Control:
    """The parts over given ports; starts nothing. ``wake``: set by anyone to have the reconciler's next pass at once."""
    places = roots(storage)
    bundles = Bundles(places.bundles)

    def folder_of(job: Job) -> str:
        return storage_url(job.id, job.spec, places)

    service = Service(store, groups, nodes, clock, wake, bundle_exists=bundles.exists, stored=StoredCheckpoints(), folder_of=folder_of)
    return Control(service, Reconciler(store, groups, nodes, clock, places, wake), store, bundles, places, clock)


def upgrade_database(settings: Settings) -> str | None:
    """Bring the database to this version; the new revision, or None when nothing was to do. Raises SettingsError, Unavailable."""
    from orchestrator.adapters.db.engine import open_engine
    from orchestrator.adapters.db.schema import SchemaTooNew, upgrade

    try:
        engine = open_engine(settings.database_url)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    try:
        return upgrade(engine)
    except SchemaTooNew as error:
        raise SettingsError(str(error)) from error
    finally:
        engine.dispose()


@contextmanager
def running(settings: Settings, nodes: int | None, gpus_per_node: int) -> Iterator[Control]:
    """A whole control plane on this machine: upgraded database, a cluster (found or started), the reconciler at work.

    ``nodes``: of the embedded cluster; None: as many as it has, else 1. That cluster goes on when the context ends. Raises SettingsError,
    Unavailable.
    """
    from orchestrator.adapters.db.engine import open_engine
    from orchestrator.adapters.db.store import SqlStore
    from orchestrator.adapters.ray import daemon, session
    from orchestrator.adapters.ray.groups import RayGroups
    from orchestrator.adapters.ray.nodes import RayNodes

    problem = StoredCheckpoints().unusable(settings.storage)
    if problem is not None:
        raise SettingsError(f"storage: {problem}")
    upgrade_database(settings)
    clock = SystemClock()
    with ExitStack() as stack:
        if settings.ray_address is None:
            try:
                cluster = daemon.start(settings.state_dir, nodes or 1, gpus_per_node)
            except daemon.StartFailed as error:
                raise Unavailable(str(error)) from error
            if nodes not in (None, cluster.nodes):
                raise SettingsError(f"nodes: the cluster that runs has {cluster.nodes}, not {nodes}; leave it out or `keepstep down` first")
            session.connect(cluster.address, cluster.token)
        else:
            session.connect(settings.ray_address)
        stack.callback(_leave, session.disconnect)
        store = SqlStore(open_engine(settings.database_url))
        stack.callback(store.close)
        wake = threading.Event()
        control = assemble(store, RayGroups(wake), RayNodes(clock), clock, settings.storage, wake)
        control.reconciler.start()
        stack.callback(control.reconciler.stop, STOP_S)
        yield control


def _leave(disconnect: Callable[[], None]) -> None:
    """A cluster that does not answer cannot be taken leave of, and need not be."""
    try:
        disconnect()
    except Unavailable as error:
        log.warning("not disconnected: %s", error)


def end_cluster(settings: Settings) -> tuple[bool, list[Job]]:
    """End the embedded cluster of the state folder: whether there was one, and the jobs that ran in it. No server may be running."""
    from orchestrator.adapters.ray import daemon

    jobs = [] if daemon.find(settings.state_dir) is None else _take_down(settings)
    return daemon.stop(settings.state_dir), jobs


def _take_down(settings: Settings) -> list[Job]:
    """Told before it is done: what the next server finds missing is then no failure of its nodes."""
    from orchestrator.adapters.db.engine import open_engine
    from orchestrator.adapters.db.store import SqlStore

    try:
        store = SqlStore(open_engine(settings.database_url))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    try:
        jobs, attempts = store.open_jobs()
        now = SystemClock().now()
        steps = [step for job in jobs if (step := taken_down(job, attempts.get(job.id), now)) is not None]
        return [store.save_step(step) for step in steps]
    except Unavailable as error:
        log.warning("what ran could not be noted, so its end will count as a loss: %s", error)
        return []
    finally:
        store.close()
