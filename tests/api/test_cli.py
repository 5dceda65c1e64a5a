"""The command `keepstep` against a real server, as a user starts it."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.client import Client, ref_path
from tests.api.conftest import TOKEN, Running
from tests.api.test_jobs import ARGV
from tests.api.test_logs import Logs


def keepstep(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "api.cli", *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def job_file(folder: Path, **fields: object) -> Path:
    path = folder / "job.yaml"
    path.write_text(json.dumps({"name": "from a file", "framework": "plain", "command": ["true"], **fields}))
    return path


def test_submit_show_cancel_wait(server: Running, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "show.py").write_text("import sys, json; print(json.dumps(sys.argv))")
    done = keepstep("submit", "-f", str(job_file(tmp_path, command=ARGV, working_dir="code", name="-rf")), "-d")
    assert (done.returncode, done.stderr) == (0, "")
    job_id = done.stdout.strip()
    stored = server.http.get(f"/api/v1/jobs/{job_id}").json()
    assert stored["spec"]["command"] == ARGV
    assert (server.state_dir / "storage" / "bundles" / f"{stored['spec']['bundle']}.zip").exists()
    assert json.loads(keepstep("get", "--json", "--", "-rf").stdout) == stored
    assert job_id in keepstep("ls").stdout
    assert json.loads(keepstep("ls", "--json", "--state", "pending").stdout) == {"items": [stored], "next_cursor": None}
    timed_out = keepstep("wait", job_id, "--timeout", "0.1")
    assert (timed_out.returncode, "PENDING" in timed_out.stderr) == (4, True)
    assert "cancel it first" in keepstep("delete", job_id).stderr
    assert keepstep("cancel", "--grace", "1", "--", "-rf").returncode == 0
    server.control.reconciler.once()
    ended = keepstep("wait", job_id)
    assert (ended.returncode, "CANCELLED" in ended.stdout) == (3, True)
    assert "Submitted" in keepstep("events", job_id).stdout
    assert keepstep("delete", job_id).stdout == f"deleted {job_id}\n"
    assert server.http.get(f"/api/v1/jobs/{job_id}").status_code == 404


def test_one_line_for_each_bad_field_and_nothing_uploaded(server: Running, tmp_path: Path) -> None:
    path = job_file(tmp_path, working_dir=".", resources={"nodes": "2"}, timeouts={"grace_s": "soon"}, colour="red")
    done = keepstep("submit", "-f", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert [line.split(": ")[1] for line in sorted(lines)] == ["colour", "resources.nodes", "timeouts.grace_s"]
    assert not (server.state_dir / "storage").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("", "must be a mapping"),
        ("name: 2026-01-31\nframework: plain\ncommand: [true]", "command.0: must be a string; put it into quotes"),
        ("name: x\nframework: plain\ncommand: [a]\nworking_dir: 7", "working_dir: must be a path"),
        ("name: x\nframework: plain\ncommand: [a]\nworking_dir: nowhere", "is not a folder"),
    ],
)
def test_files_that_are_no_spec(server: Running, tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    done = keepstep("submit", "-d", "-f", str(path))
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) >= 1
    assert "Traceback" not in done.stderr


def test_errors_say_what_to_do(server: Running, tmp_path: Path) -> None:
    assert "no job has the id or name 'nobody'" in keepstep("get", "nobody").stderr
    assert "that is not this server's token" in keepstep("ls", KEEPSTEP_TOKEN="wrong-token-of-some-length").stderr
    for verb in ("get", "logs", "cancel", "delete", "events"):
        for nobody in ("", ".", ".."):
            done = keepstep(verb, nobody)
            assert (done.returncode, done.stderr) == (2, f"error: no job has the id or name {nobody!r}; `keepstep ls` lists them\n")
    down = keepstep("ls", KEEPSTEP_SERVER="http://127.0.0.1:9")
    assert (down.returncode, "keepstep up" in down.stderr) == (2, True)
    assert "cluster" in keepstep("nodes").stderr or "ray" in keepstep("nodes").stderr
    assert keepstep("logs", "x", "--tail", "many").returncode == 2
    assert keepstep("submit", "-f", str(tmp_path / "none.yaml")).returncode == 2


def test_logs_of_any_bytes_into_any_terminal(server: Running) -> None:
    logs = Logs(server)
    logs.write("🚀 \x1b[1mbold[/bold]\n".encode() + b"\xff\xfe\n")
    shown = keepstep("logs", logs.id, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (shown.returncode, shown.stdout) == (0, "\\U0001f680 \x1b[1mbold[/bold]\n\\ufffd\\ufffd\n")
    logs.end()
    followed = keepstep("logs", "-f", logs.id)
    assert followed.returncode == 0
    assert followed.stdout == "🚀 \x1b[1mbold[/bold]\n\ufffd\ufffd\n"
    assert "CANCELLED" in followed.stderr


@pytest.fixture
def lossy(server: Running) -> Iterator[str]:
    """A proxy that forwards every request and drops the first reply to each POST."""
    dropped: set[str] = set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = httpx.post(server.address + self.path, content=body, headers=headers, trust_env=False)
            key = self.headers["Idempotency-Key"]
            if key not in dropped:
                dropped.add(key)
                self.connection.close()
                return
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{proxy.server_port}"
    proxy.shutdown()
    thread.join()
    proxy.server_close()


def test_lost_reply_does_not_submit_twice(server: Running, lossy: str) -> None:
    client = Client(lossy, TOKEN)
    job = client.submit(server.spec())
    client.close()
    assert [found["id"] for found in server.http.get("/api/v1/jobs").json()["items"]] == [job["id"]]


def test_path_of_any_name() -> None:
    assert ref_path("a/b?c#d%", "logs") == "/jobs/a%2Fb%3Fc%23d%25/logs"
