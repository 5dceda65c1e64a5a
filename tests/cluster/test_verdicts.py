"""Ranks that fail or leave in every way: the whole group ends, the true culprit is named, success needs all ranks."""

from __future__ import annotations

import time

import pytest

from tests.cluster.conftest import SCRIPTS, Server, kill, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PLAIN = {"framework": "plain", "resources": {"nodes": 1, "processes_per_node": 2}, "checkpoint": {}}


@pytest.mark.parametrize("other", ["collective", "asleep"])
def test_one_rank_raises_and_the_rest_wait(server: Server, other: str) -> None:
    script = (SCRIPTS / "toy.py").read_text()
    if other == "asleep":
        script = script.replace(
            "        fault(rank, step)\n", "        fault(rank, step)\n        if rank == 0 and step == 5:\n            time.sleep(3600)\n"
        )
    job = server.submit({"train.py": script}, env={"FAULT": "1:5:exc", "OMP_NUM_THREADS": "1"}, resources=PLAIN["resources"])
    wait_for("the exception", lambda: "on purpose" in job.log(1))
    raised_at = time.monotonic()
    ended = job.wait(15)
    assert time.monotonic() - raised_at < 10
    assert (ended["state"], ended["reason"], ended["restarts"]) == ("FAILED", "UserError", 0)
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["class"], incident["blamed_rank"], incident["action"]) == ("exception", "user_error", 1, "stop")
    assert "ValueError: the toy broke on purpose" in ended["message"]
    assert "train.py" in ended["message"]
    assert "Traceback" in incident["excerpt"]
    assert "on purpose" in incident["excerpt"]
    job.assert_nothing_left()


def test_a_rank_that_leaves_early_with_0_is_the_culprit(server: Server) -> None:
    job = server.toy("1:5:exit0")
    ended = job.wait()
    assert (ended["state"], ended["reason"]) == ("FAILED", "UserError")
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["class"], incident["blamed_rank"], incident["exit_code"]) == ("early_exit", "user_error", 1, 0)
    assert "rank 1 ended with 0" in incident["message"]
    assert "while rank 0 was still running" in incident["message"]


def test_an_exit_code_and_the_last_lines_are_in_the_incident(server: Server) -> None:
    job = server.toy("1:5:exit3")
    ended = job.wait()
    (incident,) = job.items("incidents")
    assert (ended["state"], incident["cause"], incident["exit_code"], incident["blamed_rank"]) == ("FAILED", "exit_code", 3, 1)
    assert "last words before exit 3" in incident["excerpt"]


def test_user_errors_restart_within_their_own_budget(server: Server) -> None:
    job = server.toy("1:15:exc:once", restart={"max_user_errors": 1})
    assert job.wait()["state"] == "SUCCEEDED"
    assert [i["action"] for i in job.items("incidents")] == ["restart_in_place"]


def test_success_needs_all_ranks(server: Server) -> None:
    late = "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(3)\n    open('late.txt', 'w').write('done')\n"
    job = server.submit({"train.py": late}, **PLAIN)
    wait_for("rank 0 has ended", lambda: any(r["exit_code"] == 0 for r in job.items("ranks")))
    assert job.get()["state"] not in ("SUCCEEDED", "FAILED")
    assert job.wait()["state"] == "SUCCEEDED"
    assert (job.home / "work" / "late.txt").read_text() == "done"

    fails = "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(1)\n    sys.exit(3)\n"
    job = server.submit({"train.py": fails}, **PLAIN)
    assert job.wait()["state"] == "FAILED"
    (incident,) = job.items("incidents")
    assert (incident["blamed_rank"], incident["exit_code"]) == (1, 3)


CANNOT_START = {
    "no such program": (["nope"], {}, "nope", None),
    "no such script": (["python", "nope.py"], {}, "nope.py", None),
    "no such module": (["python", "-m", "missing.module"], {}, "missing", None),
    "no exec bit": (["./run.sh"], {"run.sh": "#!/bin/sh\n"}, "run.sh", None),
    "syntax error": (["python", "train.py"], {"train.py": "def broken(:\n"}, "train.py", None),
    "import error on one rank": (
        ["python", "train.py"],
        {"train.py": "import os, time\nif os.environ['RANK'] == '1':\n    import not_there\ntime.sleep(60)\n"},
        "not_there",
        1,
    ),
}


@pytest.mark.parametrize("case", CANNOT_START)
def test_what_cannot_start_fails_in_seconds_without_restarts(server: Server, case: str) -> None:
    command, files, named, rank = CANNOT_START[case]
    job = server.submit({"other.txt": ""} | files, command=command, **PLAIN)
    ended = job.wait(30)
    assert (ended["state"], ended["reason"], ended["generation"]) == ("FAILED", "UserError", 0)
    assert named in ended["message"]
    (incident,) = job.items("incidents")
    assert incident["action"] == "stop"
    assert f"rank {incident['blamed_rank']}" in ended["message"]
    assert rank is None or incident["blamed_rank"] == rank


def test_arguments_arrive_byte_for_byte_also_after_a_restart(server: Server) -> None:
    argv = ["a b", "{'k':{'n':1}}", "", "--x=$HOME", "é\n", "*", '"', "\\", "-rf", "训练🚀"]
    show = "import json, os, sys, time\nprint('argv=' + json.dumps(sys.argv[1:]), flush=True)\n"
    show += "if os.environ['KEEPSTEP_GENERATION'] == '0':\n    time.sleep(60)\n"
    import json

    for program in (["python", "show.py"], ["sh", "-c", 'exec "$0" "$@"', "python3", "show.py"]):
        job = server.submit({"show.py": show}, command=[*program, *argv], **(PLAIN | {"resources": {"nodes": 1}}))
        wait_for("the first print", lambda j=job: "argv=" in j.log(0))
        kill(job.pid(0))
        assert job.wait()["state"] == "SUCCEEDED"
        printed = [json.loads(line[5:]) for line in job.log(0).splitlines() if line.startswith("argv=")]
        assert printed == [argv, argv]
        assert job.get()["spec"]["command"][-len(argv) :] == argv


def test_a_bundle_that_hides_our_package_is_refused_and_its_other_names_are_the_users(server: Server) -> None:
    files = {"api/__init__.py": "WHO = 'user api'", "orchestrator.py": "WHO = 'user orchestrator'"}
    files["train.py"] = "import api, orchestrator\nprint(api.WHO, '/', orchestrator.WHO, flush=True)\n"
    job = server.submit(files, **(PLAIN | {"resources": {"nodes": 1}}))
    assert job.wait()["state"] == "SUCCEEDED"
    assert "user api / user orchestrator" in job.log(0)


POISONED = """
import math, os, time
import workers

run = workers.start()
state = run.restore(state={"w": 0.0}).state
bad = 0
while run.steps < 40:
    poisoned = run.steps >= 24 and os.environ["KEEPSTEP_GENERATION"] == "0"
    state = {"w": math.nan if poisoned else state["w"] + 1}
    run.step(state=state, loss=state["w"])
    bad = bad + 1 if poisoned else 0
    print(f"step={run.steps} w={state['w']}", flush=True)
    time.sleep(0.1)
    if bad == 8:
        raise FloatingPointError("the loss is not a number any more")
"""


def test_a_program_that_fails_on_nan_goes_back_to_the_state_before(server: Server) -> None:
    spec = {"framework": "plain", "resources": {"nodes": 1}, "restart": {"max_user_errors": 1}}
    job = server.submit({"train.py": POISONED}, checkpoint={"every_steps": 10}, success={"steps": 40}, **spec)
    assert job.wait()["state"] == "SUCCEEDED"
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["class"], incident["restored_from"]) == ("exception", "user_error", "storage")
    assert (incident["resumed_step"], incident["lost_steps"]) == (20, 12)
    assert {"NonFinite", "RolledBack"} <= set(job.reasons())
    assert "step=40 w=40.0" in job.log(0)


def test_ranks_that_leave_with_0_before_the_end_have_not_succeeded(server: Server) -> None:
    swallows = "try:\n    raise ValueError('bad data')\nexcept ValueError as error:\n    print('ignored', error)\n"
    job = server.submit({"train.py": swallows}, success={"files": ["model.pt"]}, **PLAIN)
    ended = job.wait()
    assert (ended["state"], ended["reason"]) == ("FAILED", "Incomplete")
    assert "success.files lacks model.pt" in ended["message"]
    job = server.submit({"train.py": swallows}, **PLAIN)
    assert job.wait()["state"] == "SUCCEEDED"
    assert "FinishedWithoutProgress" in job.reasons()
