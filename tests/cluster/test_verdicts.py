"""Ranks that fail or leave in every way: the whole group ends, the true culprit is named, success needs all ranks."""

from __future__ import annotations

import json

import pytest

from tests.cluster.conftest import FINAL, Server, kill, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PLAIN = {"framework": "plain", "resources": {"nodes": 1, "processes_per_node": 2}, "checkpoint": {}}


def test_one_rank_raises_while_one_sleeps_and_one_waits_in_a_collective(server: Server) -> None:
    job = server.script("toy", "1:5:raise,0:5:sleep", resources={"processes_per_node": 3})
    ended = job.wait()
    assert (ended["state"], ended["reason"], ended["restarts"]) == ("FAILED", "UserError", 0)
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["class"], incident["blamed_rank"], incident["action"]) == ("exception", "user_error", 1, "stop")
    assert "ValueError: the toy broke on purpose" in ended["message"]
    assert "train.py" in ended["message"]
    assert "Traceback" in incident["excerpt"]
    assert "on purpose" in incident["excerpt"]
    job.assert_nothing_left()


def test_a_rank_that_leaves_early_with_0_is_the_culprit(server: Server) -> None:
    job = server.script("toy", "1:5:leave")
    ended = job.wait()
    assert (ended["state"], ended["reason"]) == ("FAILED", "UserError")
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["class"], incident["blamed_rank"], incident["exit_code"]) == ("early_exit", "user_error", 1, 0)
    assert "rank 1 ended with 0" in incident["message"]
    assert "while rank 0 was still running" in incident["message"]


LATE = """
import os, sys, time

while os.environ["RANK"] == "1":
    if os.path.exists("enough"):
        print("last words")
        sys.exit({code})
    time.sleep(0.02)
"""


def test_success_needs_all_ranks(server: Server) -> None:
    for code, state in ((0, "SUCCEEDED"), (3, "FAILED")):
        job = server.submit({"train.py": LATE.format(code=code)}, **PLAIN)
        wait_for("rank 0 has ended", lambda j=job: any(r["exit_code"] == 0 for r in j.items("ranks")))
        assert job.get()["state"] not in FINAL
        job.let_finish()
        assert job.wait()["state"] == state
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["blamed_rank"], incident["exit_code"]) == ("exit_code", 1, 3)
    assert "last words" in incident["excerpt"]


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
    programs = (["python", "show.py"], ["sh", "-c", 'exec "$0" "$@"', "python3", "show.py"])
    spec = PLAIN | {"resources": {"nodes": 1}}
    jobs = [server.submit({"show.py": show}, command=[*program, *argv], **spec) for program in programs]
    for job in jobs:
        wait_for("the first print", lambda j=job: "argv=" in j.log(0))
        kill(job.pid(0))
    for job in jobs:
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
    time.sleep(0.05)
    if bad == 8:
        raise FloatingPointError("the loss is not a number any more")
"""


def test_a_program_that_fails_on_nan_goes_back_to_the_state_before(server: Server) -> None:
    spec = {"framework": "plain", "resources": {"nodes": 1}, "restart": {"max_user_errors": 1}}
    job = server.submit({"train.py": POISONED}, checkpoint={"every_steps": 10}, success={"steps": 40}, **spec)
    assert job.wait()["state"] == "SUCCEEDED"
    (incident,) = job.items("incidents")
    assert (incident["cause"], incident["class"], incident["action"]) == ("exception", "user_error", "restart_in_place")
    assert incident["restored_from"] == "storage"
    assert (incident["resumed_step"], incident["lost_steps"]) == (20, 12)
    assert {"NonFinite", "RolledBack"} <= set(job.reasons())
    assert "step=40 w=40.0" in job.log(0)


def test_ranks_that_leave_with_0_before_the_end_have_not_succeeded(server: Server) -> None:
    swallows = "try:\n    raise ValueError('bad data')\nexcept ValueError as error:\n    print('ignored', error)\n"
    asks = server.submit({"train.py": swallows}, success={"files": ["model.pt"]}, **PLAIN)
    trusts = server.submit({"train.py": swallows}, **PLAIN)
    ended = asks.wait()
    assert (ended["state"], ended["reason"]) == ("FAILED", "Incomplete")
    assert "success.files lacks model.pt" in ended["message"]
    assert trusts.wait()["state"] == "SUCCEEDED"
    assert "FinishedWithoutProgress" in trusts.reasons()
