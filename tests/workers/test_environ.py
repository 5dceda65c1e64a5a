"""The environment of launchers and ranks, as the processes and the ``workers`` package of user code read it."""

from __future__ import annotations

import json
import socket
from typing import Any

import psutil
import pytest

from tests.workers.make import GENERATION, NOTHING, order, spec
from workers.environ import launcher_environment, rank_environment
from workers.environment import read_environment
from workers.interfaces import interface_of
from workers.messages import RestoreOrder, Source

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
    "TORCHELASTIC_RESTART_COUNT": str(GENERATION),
    "TORCHELASTIC_MAX_RESTARTS": "20",
    "TORCHELASTIC_RUN_ID": "job-x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def of_rank(
    index: int = 1, local_rank: int = 1, agent_store: bool = True, restore: RestoreOrder = NOTHING, **changes: Any
) -> dict[str, str]:
    given = spec(**{"processes_per_node": 2, **changes})
    return rank_environment(given, index, local_rank, order(restore, agent_store=agent_store), "/shm/x", "/saved", None)


def of_launcher(base: dict[str, str] | None = None, interface: str | None = None, **changes: Any) -> dict[str, str]:
    return launcher_environment(base or {}, spec(**changes), 1, interface, "/tmp/x")


def test_pytorch_gets_what_torchrun_gives() -> None:
    env = of_rank()
    assert {name: env.get(name) for name in TORCHRUN} == TORCHRUN


def test_a_store_is_only_announced_where_one_is_served() -> None:
    """With the variable and no store behind it, ranks wait for ever."""
    env = of_rank(agent_store=False)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["MASTER_PORT"] == "4000"


@pytest.mark.parametrize(
    ("changes", "has_rank"),
    [
        pytest.param({"framework": "plain", "nodes": 1, "processes_per_node": 1}, False, id="plain, one process"),
        pytest.param({"framework": "plain", "nodes": 1, "processes_per_node": 2}, True, id="plain, two processes"),
        pytest.param({"framework": "plain", "nodes": 2, "processes_per_node": 1}, True, id="plain, two nodes"),
        pytest.param({"framework": "tensorflow", "nodes": 1, "processes_per_node": 1}, False, id="tensorflow, one process"),
        pytest.param({"framework": "pytorch", "nodes": 1, "processes_per_node": 1}, True, id="pytorch, one process"),
    ],
)
def test_who_gets_a_rank(changes: dict[str, Any], has_rank: bool) -> None:
    """Some scripts take RANK as the sign for more than one process."""
    env = of_rank(index=0, local_rank=0, agent_store=False, **changes)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        assert (name in env) is has_rank, name
    assert env["KEEPSTEP_RANK"] == "0"


def test_keepstep_variables_of_a_rank() -> None:
    env = of_rank(every_steps=100, snapshot_every_steps=5, framework="plain", strategy=None)
    assert {name: value for name, value in env.items() if name.startswith("KEEPSTEP_")} == {
        "KEEPSTEP_RANK": "3",
        "KEEPSTEP_WORLD_SIZE": "4",
        "KEEPSTEP_LOCAL_RANK": "1",
        "KEEPSTEP_LOCAL_WORLD_SIZE": "2",
        "KEEPSTEP_NODE_RANK": "1",
        "KEEPSTEP_GENERATION": "3",
        "KEEPSTEP_FRAMEWORK": "plain",
        "KEEPSTEP_STRATEGY": "",
        "KEEPSTEP_SHM": "/shm/x",
        "KEEPSTEP_CHECKPOINT_DIR": "/saved",
        "KEEPSTEP_EVERY_STEPS": "100",
        "KEEPSTEP_SNAPSHOT_EVERY": "5",
        "KEEPSTEP_RESTORE": "null",
    }


def test_devices_of_mirrored() -> None:
    assert of_rank(framework="tensorflow", strategy="mirrored", devices_per_node=2)["KEEPSTEP_DEVICES"] == "2"
    assert "KEEPSTEP_DEVICES" not in of_rank()


@pytest.mark.parametrize(
    ("restore", "staged", "expected"),
    [
        (NOTHING, None, None),
        (RestoreOrder(Source.MEMORY, 40), None, {"step": 40, "source": "memory", "staged": None}),
        (RestoreOrder(Source.STORAGE, 30, "/c/30"), "staged-30", {"step": 30, "source": "storage", "staged": "staged-30"}),
    ],
)
def test_where_a_rank_restores_from(restore: RestoreOrder, staged: str | None, expected: dict[str, Any] | None) -> None:
    env = rank_environment(spec(), 0, 0, order(restore), "/shm/x", "/saved", staged)
    assert json.loads(env["KEEPSTEP_RESTORE"]) == expected


def test_user_code_reads_what_was_written() -> None:
    read = read_environment(of_rank(restore=RestoreOrder(Source.MEMORY, 40), every_steps=100))
    assert (read.place.rank, read.place.world_size, read.place.local_rank, read.place.local_world_size) == (3, 4, 1, 2)
    assert (read.place.generation, read.framework, read.strategy) == (GENERATION, "pytorch", "ddp")
    assert (str(read.shm), read.every_steps, read.snapshot_every, read.devices) == ("/shm/x", 100, None, None)
    assert read.restore is not None
    assert (read.restore.step, read.restore.source, read.restore.staged) == (40, "memory", None)


def test_the_node_is_inherited_but_not_rays_and_our_own_variables() -> None:
    base = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "RAY_ADDRESS": "10.0.0.9:6379",
        "RAY_JOB_ID": "01000000",
        "RAY_AUTH_TOKEN": "secret",
        "KEEPSTEP_TOKEN": "secret",
        "KEEPSTEP_STATE_DIR": "/state",
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
        "OMP_NUM_THREADS": "1",
    }
    env = of_launcher(base, cpus_per_node=8)
    assert (env["PATH"], env["LD_LIBRARY_PATH"]) == ("/bin", "/lib")
    assert not [name for name in env if name.startswith("RAY_")]
    assert "secret" not in env.values()
    assert "PYTHONBREAKPOINT" not in env
    assert sorted(name for name in env if name.startswith("KEEPSTEP_")) == ["KEEPSTEP_ATTEMPT", "KEEPSTEP_GROUP", "KEEPSTEP_JOB_ID"]


def test_the_mark_of_the_cluster_is_passed_on() -> None:
    assert of_launcher({"KEEPSTEP_CLUSTER": "c1"})["KEEPSTEP_CLUSTER"] == "c1"


def test_marks_of_the_group() -> None:
    env = of_launcher()
    assert (env["KEEPSTEP_GROUP"], env["KEEPSTEP_JOB_ID"], env["KEEPSTEP_ATTEMPT"]) == ("job-x.1.1", "job-x", "1")


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(8, 2, "4"), (1, 1, "1"), (0.5, 1, "1"), (1, 4, "1"), (7, 2, "3")])
def test_threads_share_the_cores(cpus: float, processes: int, threads: str) -> None:
    assert of_launcher(cpus_per_node=cpus, processes_per_node=processes)["OMP_NUM_THREADS"] == threads


def test_temporary_files_lie_where_the_group_has_its_own() -> None:
    assert of_launcher({"TMPDIR": "/var/tmp"})["TMPDIR"] == "/tmp/x"


def test_the_users_environment_wins_where_it_may() -> None:
    wish = {
        "OMP_NUM_THREADS": "7",
        "PYTHONUNBUFFERED": "",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "GLOO_SOCKET_IFNAME": "eth9",
        "PATH": "/mine",
        "TMPDIR": "/large",
        "A": "b",
    }
    env = of_launcher({"PATH": "/bin"}, interface="lo", env=wish)
    assert {name: env[name] for name in wish} == wish


def test_the_users_environment_cannot_take_a_process_out_of_its_group() -> None:
    env = of_launcher(env={"KEEPSTEP_GROUP": "job-y.1.0", "KEEPSTEP_JOB_ID": "job-y", "KEEPSTEP_ATTEMPT": "9"})
    assert (env["KEEPSTEP_GROUP"], env["KEEPSTEP_JOB_ID"], env["KEEPSTEP_ATTEMPT"]) == ("job-x.1.1", "job-x", "1")


def test_ranks_speak_over_the_interface_of_their_node() -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [of_launcher(interface="eth1")[name] for name in names] == ["eth1", "=eth1"]
    assert [of_launcher(interface=None).get(name) for name in names] == [None, None]
    assert [of_launcher({"NCCL_SOCKET_IFNAME": "ib"}, "lo", env={names[0]: "eth9"})[name] for name in names] == ["eth9", "ib"]


def test_an_interface_is_found_by_the_address_that_it_carries() -> None:
    carried = psutil.net_if_addrs()
    for name, addresses in carried.items():
        for found in addresses:
            if found.family == socket.AF_INET:
                assert interface_of(found.address) == name
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("203.0.113.7") is None


def test_role_rank_is_the_rank_as_torchrun_gives_it() -> None:
    env = rank_environment(spec(processes_per_node=2), 1, 1, order(), "/shm/x", "/saved", None)
    assert (env["ROLE_RANK"], env.get("ROLE_WORLD_SIZE")) == ("3", "4")
