"""The embedded Ray of ``keepstep up``: a daemon that outlives the server, found again by its state folder and ended by its own process ids.

Invariants: every process of a cluster carries KEEPSTEP_CLUSTER=<its id> in its environment, and only processes that do are ever signalled;
the id is on disk before the first process starts, so whatever a crash leaves can still be found and ended; two state folders have two
clusters that share no port, token, temporary folder or shared memory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from orchestrator.adapters.ray.session import ray_environment
from workers.processes import CLUSTER_MARK, SHM_ROOT, TMP_ROOT

START_S = 120
STOP_S = 1  # from SIGTERM to SIGKILL
_OBJECT_STORE_BYTES = 200 * 1024**2  # of all nodes together; Ray takes no less than 75 MiB for one
_OBJECT_STORE_LEAST = 80 * 1024**2


@dataclass(frozen=True)
class Cluster:
    """A running cluster. ``address`` is host:port; ``nodes`` does not count the head."""

    id: str
    address: str
    token: str
    temp_dir: str
    nodes: int


class StartFailed(Exception):
    """Ray did not come up; nothing of it is left running."""


def start(state_dir: Path, nodes: int = 1, gpus_per_node: int = 0, cpus_per_node: int | None = None) -> Cluster:
    """The cluster of this state folder, started if it does not run; one that runs is returned as it is. Raises StartFailed.

    ``cpus_per_node``: default all cores of the machine on each node, at least 2; one machine may promise its cores more than once.
    """
    running = find(state_dir)
    if running is not None:
        return running
    stop(state_dir)
    state_dir.mkdir(parents=True, exist_ok=True)
    # Ray's Unix sockets lie in here; their paths may have 107 bytes, so the state folder is no place for them.
    temp_dir = tempfile.mkdtemp(prefix="keepstep-", dir="/tmp")
    cluster = Cluster(id=secrets.token_hex(8), address="", token=secrets.token_hex(32), temp_dir=temp_dir, nodes=nodes)
    _save(state_dir, cluster)
    wanted = {
        "temp_dir": temp_dir,
        "nodes": nodes,
        "cpus": cpus_per_node or max(2, os.cpu_count() or 1),
        "gpus": gpus_per_node,
        "memory": int(psutil.virtual_memory().total * 0.8 / max(1, nodes)),
        "object_store": max(_OBJECT_STORE_LEAST, _OBJECT_STORE_BYTES // (nodes + 1)),
    }
    try:
        cluster = replace(cluster, address=_launch(state_dir, cluster, wanted))
    except BaseException:
        stop(state_dir)
        raise
    _save(state_dir, cluster)
    return cluster


def find(state_dir: Path) -> Cluster | None:
    """The cluster of this state folder if it lives: its control service runs and takes connections. None otherwise."""
    cluster = _load(state_dir)
    if cluster is None or not cluster.address:
        return None
    host, port = cluster.address.rsplit(":", 1)
    if not any("gcs_server" in " ".join(_command(process)) for process in _processes(cluster.id)):
        return None
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return None
    return cluster


def stop(state_dir: Path) -> bool:
    """Ends every process of the cluster and removes its files; returns once all are gone. False when there was none."""
    cluster = _load(state_dir)
    if cluster is None:
        return False
    living = _processes(cluster.id)
    for process in living:
        _signal(process, kill=False)
    living = set(psutil.wait_procs(living, timeout=STOP_S)[1])
    while living := living | _processes(cluster.id):  # again, for what was forked meanwhile
        for process in living:
            _signal(process, kill=True)
        living = set(psutil.wait_procs(living, timeout=STOP_S)[1])
    for folder in (Path(cluster.temp_dir), shared_memory(cluster.id), temporary_files(cluster.id)):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        shared_memory(cluster.id).parent.rmdir()  # unless another cluster uses it
    _file(state_dir).unlink(missing_ok=True)
    return True


def shared_memory(cluster_id: str) -> Path:
    """Folder of all snapshots and boards of a cluster."""
    return Path("/dev/shm/keepstep") / cluster_id


def temporary_files(cluster_id: str) -> Path:
    """Folder of the temporary files of all ranks of a cluster."""
    return Path(tempfile.gettempdir()) / f"keepstep-{cluster_id}"


def _launch(state_dir: Path, cluster: Cluster, wanted: dict[str, object]) -> str:
    log_path = state_dir / "cluster.log"
    with log_path.open("w") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "orchestrator.adapters.ray.local_nodes"],
                input=json.dumps(wanted),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=START_S,
                cwd=cluster.temp_dir,
                env=_environment(cluster),
                start_new_session=True,  # a Ctrl-C in the terminal of the server must not reach it
            )
        except subprocess.TimeoutExpired as error:
            raise StartFailed(f"Ray did not start within {START_S} s; see {log_path}") from error
    if done.returncode != 0:
        raise StartFailed(f"Ray did not start (exit code {done.returncode}); see {log_path}:\n{log_path.read_text()[-2000:]}")
    return str(json.loads(done.stdout)["address"])


def _environment(cluster: Cluster) -> dict[str, str]:
    """The caller's, without what would tie the daemon to another cluster or leak the server's secrets into it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KEEPSTEP_"))}
    own = {
        CLUSTER_MARK: cluster.id,
        SHM_ROOT: str(shared_memory(cluster.id)),
        TMP_ROOT: str(temporary_files(cluster.id)),
        "SPT_NOENV": "1",  # Ray would write the titles of its processes over their environment, and the mark with it
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return inherited | ray_environment(cluster.token) | own


def _processes(cluster_id: str) -> set[psutil.Process]:
    """Live processes with the mark of the cluster and their descendants, but for the caller and those that wait for it."""
    marked: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(CLUSTER_MARK) == cluster_id and process.status() != psutil.STATUS_ZOMBIE:
                marked |= {process, *process.children(recursive=True)}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    caller = psutil.Process()
    return marked - {caller, *caller.parents()}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return


def _file(state_dir: Path) -> Path:
    return state_dir / "cluster.json"


def _load(state_dir: Path) -> Cluster | None:
    try:
        return Cluster(**json.loads(_file(state_dir).read_text()))
    except FileNotFoundError:
        return None


def _save(state_dir: Path, cluster: Cluster) -> None:
    """By rename, and readable by its owner only: it holds the token."""
    temporary = _file(state_dir).with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(cluster), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(_file(state_dir))
