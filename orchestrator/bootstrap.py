"""Puts the parts of a server together: store, groups, nodes, service, reconciler, storage.

Invariants: adapters are imported here and nowhere above; closing takes everything down again in reverse order and leaves jobs alone.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from orchestrator.adapters.storage.bundles import Bundles
from orchestrator.adapters.storage.checkpoints import StoredCheckpoints
from orchestrator.adapters.storage.logs import LogStore
from orchestrator.clock import SystemClock
from orchestrator.core.group_spec import Roots, storage_url
from orchestrator.core.lease import Lease, foreign
from orchestrator.core.lifecycle import taken_down
from orchestrator.core.model import Job
from orchestrator.leadership import Leadership
from orchestrator.ports import Clock, Groups, Leases, Nodes, Store, Unavailable
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
    leadership: Leadership
    leases: Leases
    store: Store
    bundles: Bundles
    roots: Roots
    clock: Clock

    def last_pass_at(self) -> float | None:
        """When the newest pass of whichever server leads was complete, Unix seconds. Raises Unavailable."""
        work = self.reconciler.work
        return work.last_pass_at if work.leads else self.leases.lease().passed_at

    def logs_of(self, job: Job) -> LogStore:
        return LogStore(storage_url(job.id, job.spec, self.roots))


def roots(storage: str) -> Roots:
    """Folders below the storage setting."""
    base = storage.rstrip("/")
    return Roots(jobs=f"{base}/jobs", bundles=f"{base}/bundles")


def assemble(
    store: Store,
    groups: Groups,
    nodes: Nodes,
    clock: Clock,
    storage: str,
    wake: threading.Event,
    leases: Leases,
    cluster: str,
    *,
    sole: bool,
) -> Control:
    """The parts over given ports; starts nothing. ``wake``: set by anyone to have the reconciler's next pass at once; ``cluster``: where
    jobs run; ``sole``: no other server can use this database."""
    places = roots(storage)
    bundles = Bundles(places.bundles)

    def folder_of(job: Job) -> str:
        return storage_url(job.id, job.spec, places)

    service = Service(store, groups, nodes, clock, wake, bundle_exists=bundles.exists, stored=StoredCheckpoints(), folder_of=folder_of)
    leadership = Leadership(leases, f"{socket.gethostname()}:{os.getpid()}", cluster, wake, sole=sole)
    reconciler = Reconciler(store, groups, nodes, clock, places, wake, leadership)
    return Control(service, reconciler, leadership, leases, store, bundles, places, clock)


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
    from orchestrator.adapters.db.leases import SqlLeases
    from orchestrator.adapters.db.notices import listening
    from orchestrator.adapters.db.store import SqlStore
    from orchestrator.adapters.ray import daemon, session
    from orchestrator.adapters.ray.groups import RayGroups
    from orchestrator.adapters.ray.nodes import RayNodes

    problem = StoredCheckpoints().unusable(settings.storage)
    if problem is not None:
        raise SettingsError(f"storage: {problem}")
    clock, place = SystemClock(), _cluster_name(settings)
    with ExitStack() as stack:
        sole = stack.enter_context(_only_server(settings))
        upgrade_database(settings)
        engine = open_engine(settings.database_url)
        stack.callback(engine.dispose)
        leases = SqlLeases(engine)
        _refuse_foreign(leases.lease(), place)
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
        wake = threading.Event()
        stack.enter_context(listening(engine, wake))
        control = assemble(SqlStore(engine), RayGroups(wake), RayNodes(clock), clock, settings.storage, wake, leases, place, sole=sole)
        stack.callback(control.leadership.stop)
        control.leadership.start()
        stack.callback(control.reconciler.stop, STOP_S)
        control.reconciler.start()
        yield control


def _cluster_name(settings: Settings) -> str:
    """The same for all servers whose jobs run in one Ray cluster. With SQLite they are on one machine, whatever its name is today."""
    host = "" if settings.database_url.startswith("sqlite") else f"{socket.gethostname()}:"
    return settings.ray_address or f"embedded in {host}{settings.state_dir}"


@contextmanager
def _only_server(settings: Settings) -> Iterator[bool]:
    """True where no other server can use the database. Raises SettingsError."""
    from orchestrator.adapters.db.leases import OtherServer, only_server

    try:
        with only_server(settings.database_url) as sole:
            yield sole
    except OtherServer as error:
        raise SettingsError(str(error)) from error


def _refuse_foreign(lease: Lease, cluster: str) -> None:
    """Servers of two clusters on one database would each take the other's jobs for lost."""
    if foreign(lease, cluster):
        raise SettingsError(
            f"ray_address: the server {lease.holder} leads on this database, and its jobs run in the cluster "
            f"{lease.cluster}, not in {cluster}; "
            "set the same KEEPSTEP_RAY_ADDRESS, or stop that server first (where it died for good: `keepstep db release`)"
        )


def release_lease(settings: Settings) -> str | None:
    """Gives back the lease of a server that died for good; its name, None where nobody held it. Raises SettingsError, Unavailable."""
    from orchestrator.adapters.db.engine import open_engine
    from orchestrator.adapters.db.leases import SqlLeases

    upgrade_database(settings)
    engine = open_engine(settings.database_url)
    try:
        leases = SqlLeases(engine)
        lease = leases.lease()
        if lease.holder is not None:
            leases.release(lease.fence)
        return lease.holder
    finally:
        engine.dispose()


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
    from orchestrator.adapters.db.leases import SqlLeases
    from orchestrator.adapters.db.store import SqlStore

    try:
        engine = open_engine(settings.database_url)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    store, leases = SqlStore(engine), SqlLeases(engine)
    try:
        jobs, attempts = store.open_jobs()
        now = SystemClock().now()
        steps = [step for job in jobs if (step := taken_down(job, attempts.get(job.id), now)) is not None]
        lease = leases.take(leases.lease(), "keepstep down", _cluster_name(settings)) if steps else None
        if lease is None:
            return []
        saved = [store.save_step(step, lease.fence) for step in steps]
        leases.release(lease.fence)
        return saved
    except Unavailable as error:
        log.warning("what ran could not be noted, so its end will count as a loss: %s", error)
        return []
    finally:
        store.close()
