"""The embedded Ray: found again, side by side with others, gone without a trace, and silent without taking us along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.adapters.ray import daemon, session
from orchestrator.adapters.ray.nodes import RayNodes
from orchestrator.clock import SystemClock
from orchestrator.core.model import NodeState
from orchestrator.ports import Unavailable

pytestmark = pytest.mark.cluster


def _marked(cluster: daemon.Cluster) -> set[psutil.Process]:
    return daemon._processes(cluster.id)


def _one(cluster: daemon.Cluster, *signs: str) -> psutil.Process:
    (found,) = [process for process in _marked(cluster) if all(sign in " ".join(process.cmdline()) for sign in signs)]
    return found


def _traces(cluster: daemon.Cluster) -> list[object]:
    folders = [Path(cluster.temp_dir), daemon.shared_memory(cluster.id), daemon.temporary_files(cluster.id)]
    return [*_marked(cluster), *(folder for folder in folders if folder.exists())]


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a")


@pytest.fixture(scope="module")
def cluster(state_dir: Path) -> Iterator[daemon.Cluster]:
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"  # a stale one of the caller must not matter
    cluster = daemon.start(state_dir, nodes=2, gpus_per_node=3, cpus_per_node=4)
    os.environ.pop("RAY_ADDRESS", None)
    yield cluster
    session.disconnect()
    daemon.stop(state_dir)


@pytest.fixture
def nodes(cluster: daemon.Cluster) -> RayNodes:
    session.connect(cluster.address, cluster.token)
    return RayNodes(SystemClock())


def test_its_nodes_are_as_asked_and_the_head_offers_no_cpus(nodes: RayNodes) -> None:
    head, *others = nodes.nodes()
    assert (head.head, head.name, head.cpus, head.gpus) == (True, "head", 0.0, 0)
    assert [(node.name, node.head, node.state) for node in others] == [(f"local-{n}", False, NodeState.READY) for n in (1, 2)]
    for node in others:
        assert (node.cpus, node.gpus, node.free_cpus, node.free_gpus) == (4.0, 3, 4.0, 3.0)
        assert 0 < node.free_memory_gb == node.memory_gb < psutil.virtual_memory().total / 1024**3 / 2
    assert len({node.id for node in (head, *others)}) == 3


def test_free_is_what_ray_has_not_given_away(nodes: RayNodes) -> None:
    import ray

    group = ray.util.placement_group([{"CPU": 3, "GPU": 1}])
    ray.get(group.ready(), timeout=20)
    assert sorted((node.free_cpus, node.free_gpus) for node in nodes.nodes() if not node.head) == [(1.0, 2.0), (4.0, 3.0)]
    ray.util.remove_placement_group(group)


def test_drivers_attach_to_the_head_so_that_a_lost_node_takes_none_along(nodes: RayNodes) -> None:
    import ray

    assert ray.get_runtime_context().get_node_id() == nodes.nodes()[0].id


def test_it_is_found_again_and_not_started_twice(state_dir: Path, cluster: daemon.Cluster) -> None:
    before = {process.pid for process in _marked(cluster)}
    assert daemon.find(state_dir) == cluster
    assert daemon.start(state_dir, nodes=1) == cluster
    assert before <= {process.pid for process in _marked(cluster)}


def test_its_secret_is_the_owners_and_its_ports_are_the_machines(state_dir: Path, cluster: daemon.Cluster) -> None:
    assert (state_dir / "cluster.json").stat().st_mode & 0o777 == 0o600
    listening = [c for process in _marked(cluster) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 5
    assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}


def test_no_process_of_it_hears_the_terminal_of_the_server(cluster: daemon.Cluster) -> None:
    assert all(os.getsid(process.pid) != os.getsid(0) for process in _marked(cluster))


def test_two_live_side_by_side_and_one_goes_with_all_that_it_started_and_alone(
    cluster: daemon.Cluster, state_dir: Path, tmp_path: Path
) -> None:
    other = daemon.start(tmp_path, nodes=1)
    try:
        assert {other.address, other.token, other.temp_dir}.isdisjoint({cluster.address, cluster.token, cluster.temp_dir})
        session.connect(cluster.address, cluster.token)
        assert len(RayNodes(SystemClock()).nodes()) == 3
        session.connect(other.address, other.token)
        assert len(RayNodes(SystemClock()).nodes()) == 2
        child = _deaf_child_of_an_actor()
        assert child in _marked(other)
        session.disconnect()
    finally:
        before = {process.pid for process in _marked(cluster)}
        assert daemon.stop(tmp_path)
    assert _traces(other) == []
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not (tmp_path / "cluster.json").exists()
    assert before <= {process.pid for process in _marked(cluster)}
    assert daemon.find(state_dir) == cluster
    assert daemon.find(tmp_path) is None
    assert not daemon.stop(tmp_path)


def _deaf_child_of_an_actor() -> psutil.Process:
    """Deaf to SIGTERM, in a session of its own, and without a parent soon; the actor has made folders of the cluster too."""
    import ray

    @ray.remote(num_cpus=0)
    class Parent:
        def start(self) -> int:
            for folder in (daemon.shared_memory, daemon.temporary_files):
                folder(os.environ[daemon.CLUSTER_MARK]).mkdir(parents=True)
            child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
            return subprocess.Popen([sys.executable, "-c", child], start_new_session=True).pid

    parent = Parent.options(lifetime="detached", name="parent").remote()
    return psutil.Process(ray.get(parent.start.remote(), timeout=30))


def test_a_control_service_that_is_silent_is_unavailable_until_it_speaks(cluster: daemon.Cluster, nodes: RayNodes) -> None:
    gcs = _one(cluster, "gcs_server")
    gcs.suspend()
    try:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="no answer within 5 s"):
            nodes.nodes()
        assert time.monotonic() - began < 6
    finally:
        gcs.resume()
    assert len(nodes.nodes()) == 3


def test_nobody_at_the_address_is_unavailable_at_once(cluster: daemon.Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"nothing answers at 127\.0\.0\.1:1:"):
        session.connect("127.0.0.1:1", "token")
    assert time.monotonic() - began < 3


def test_a_lost_node_stays_in_view(cluster: daemon.Cluster, nodes: RayNodes) -> None:
    nodes.nodes()
    began = time.monotonic()
    _one(cluster, "/raylet ", "raylet-2 ").kill()
    while all(node.state == NodeState.READY for node in nodes.nodes()):
        time.sleep(0.05)
        assert time.monotonic() - began < 10
    (lost,) = [node for node in nodes.nodes() if node.state == NodeState.UNREACHABLE]
    assert lost.name == "local-2"
    assert lost.conditions


def test_a_start_that_was_killed_midway_can_be_stopped(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from orchestrator.adapters.ray import daemon; daemon.start(Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as starter:
        while (cluster := daemon._load(tmp_path)) is None or not _marked(cluster):
            time.sleep(0.02)
        starter.send_signal(signal.SIGKILL)
    assert daemon.find(tmp_path) is None
    assert daemon.stop(tmp_path)
    assert _traces(cluster) == []
