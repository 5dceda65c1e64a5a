"""Logs as ranks write them: raw bytes, endless lines, rotation, generations; whole, tailed and followed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.client import Client, LogEvent
from api.logstream import SKIPPED, Cursor, parse_cursor
from orchestrator.adapters.storage.logs import LONGEST_LINE, LogStore, Position, cut
from orchestrator.core.actions import JobStep
from orchestrator.core.states import JobState
from tests.api.conftest import TOKEN, Running

EMOJI = "🚀"


class Logs:
    """A submitted job whose attempt 1 has run, and the folder into which its ranks write."""

    def __init__(self, server: Running, ranks: int = 1) -> None:
        self.server = server
        self.id = server.submit(resources={"processes_per_node": ranks})["id"]
        self.folder = Path(server.control.roots.jobs) / self.id / "logs"
        self._save(attempt=1, generation=9)

    def write(self, data: bytes, rank: int = 0, generation: int = 0, attempt: int = 1) -> Path:
        path = self.folder / f"a{attempt}" / f"g{generation}" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
        return path

    def read(self, **params: Any) -> str:
        answer = self.server.http.get(f"/api/v1/jobs/{self.id}/logs", params=params)
        assert answer.status_code == 200, answer.text
        return answer.text

    def follow(self, since: str | None = None, **params: Any) -> Iterator[LogEvent]:
        client = Client(self.server.address, TOKEN)
        try:
            yield from client.follow(f"/jobs/{self.id}/logs", since, **params)
        finally:
            client.close()

    def end(self) -> None:
        """The job becomes final, by the way that the reconciler takes."""
        self._save(state=JobState.CANCELLED, reason="Cancelled")

    def _save(self, **facts: Any) -> None:
        store = self.server.control.store
        job = store.job(self.id)
        assert job is not None
        store.save_step(JobStep(replace(job, **facts), None))


def test_whole_log_of_all_ranks_and_generations_in_order(server: Running) -> None:
    logs = Logs(server, ranks=2)
    logs.write(b"old attempt\n", attempt=0)
    logs.write(b"g0 r0\n")
    logs.write(b"g0 r1 unfinished", rank=1)
    logs.write(b"g10\n", generation=10)
    logs.write(b"g2\n", generation=2)
    assert logs.read() == "[rank 0] g0 r0\n[rank 1] g0 r1 unfinished\n[rank 0] g2\n[rank 0] g10\n"
    assert logs.read(rank=1) == "g0 r1 unfinished"
    assert logs.read(generation=2) == "[rank 0] g2\n"


def test_binary_bytes_are_shown_and_nothing_behind_them_is_lost(server: Running) -> None:
    logs = Logs(server)
    noise = os.urandom(1_000_000)
    logs.write(noise + b"\nafter\n" + "UTF-16 text\n".encode("utf-16") + b"\nlast\n")
    text = logs.read(rank=0)
    assert text.endswith("\nlast\n")
    assert "\nafter\n" in text
    assert logs.folder.joinpath("a1/g0/rank-0.log").read_bytes().startswith(noise)


def test_emoji_on_every_border_is_whole(server: Running) -> None:
    for shift in range(4):
        logs = Logs(server)
        line = "x" * shift + EMOJI * (LONGEST_LINE // 2)
        logs.write(line.encode() + b"\nend\n")
        assert logs.read(rank=0) == line + "\nend\n"


def test_endless_line_is_sent_in_pieces_while_it_grows(server: Running) -> None:
    logs = Logs(server)
    logs.write(b"y" * (3 * LONGEST_LINE + 10))
    events = logs.follow()
    pieces = [next(event for event in events if event.kind == "log").data["text"] for _ in range(3)]
    assert [len(piece) for piece in pieces] == [LONGEST_LINE] * 3
    logs.end()
    rest = [event.data["text"] for event in events if event.kind == "log"]
    assert "".join(rest) == "y" * 10
    assert logs.read(rank=0) == "y" * (3 * LONGEST_LINE + 10)


@pytest.mark.parametrize(
    ("data", "lines", "expected"),
    [
        (b"a\nb\nc\n", 2, "b\nc\n"),
        (b"a\nb\nc", 2, "b\nc"),
        (b"a\nb\n", 5, "a\nb\n"),
        (b"", 3, ""),
        (b"a\n\n\n", 2, "\n\n"),
        (b"a\nb\n", 0, ""),
        (b"z" * 200_000 + b"\nlast\n", 1, "last\n"),
        (b"first\n" + b"z" * 200_000, 1, "z" * 200_000),
    ],
)
def test_tail(server: Running, data: bytes, lines: int, expected: str) -> None:
    logs = Logs(server)
    logs.write(data)
    assert logs.read(rank=0, tail=lines) == expected


def test_tail_is_bounded_in_bytes(server: Running) -> None:
    logs = Logs(server)
    logs.write(b"w" * 6_000_000)
    assert len(logs.read(rank=0, tail=10)) == 4 * 1024**2


def test_tail_begins_in_the_newest_generation_that_wrote(server: Running) -> None:
    logs = Logs(server)
    logs.write(b"zero\n")
    logs.write(b"one\n", generation=1)
    logs.write(b"", generation=2)
    assert logs.read(rank=0, tail=5) == "one\n"


def test_tail_and_whole_over_rotated_parts(server: Running) -> None:
    logs = Logs(server)
    path = logs.write(b"1\n2\nhalf ")
    path.rename(path.with_suffix(".log.2"))
    path = logs.write(f"of 3\n{EMOJI}".encode()[:7])
    path.rename(path.with_suffix(".log.1"))
    logs.write(EMOJI.encode()[2:] + b"\n5\n")
    assert logs.read(rank=0) == f"1\n2\nhalf of 3\n{EMOJI}\n5\n"
    assert logs.read(rank=0, tail=1) == "5\n"


def test_follow_over_writes_rotation_and_a_new_generation_until_the_end(server: Running) -> None:
    logs = Logs(server, ranks=2)
    seen: list[LogEvent] = []
    arrived = threading.Condition()

    def watch() -> None:
        for event in logs.follow():
            with arrived:
                seen.append(event)
                arrived.notify_all()

    def wait_for(text: str) -> None:
        with arrived:
            assert arrived.wait_for(lambda: any(text == event.data.get("text") for event in seen), 20), text

    thread = threading.Thread(target=watch)
    thread.start()
    path = logs.write(b"one\ntw")
    wait_for("one\n")
    logs.write(b"o\n")
    wait_for("two\n")
    path.rename(path.with_suffix(".log.1"))
    path.with_suffix(".log.1").open("ab").write(b"three\n")
    logs.write(b"four\n", rank=1)
    logs.write(b"five\n")
    wait_for("three\n")
    wait_for("five\n")
    logs.write(b"cut off when it died", rank=1)
    logs.write(b"again\n", generation=1)
    wait_for("again\n")
    logs.end()
    thread.join(20)
    assert not thread.is_alive()
    texts = [event.data["text"] for event in seen if event.kind == "log"]
    assert sorted(texts) == sorted(["one\n", "two\n", "three\n", "four\n", "five\n", "cut off when it died", "again\n"])
    assert texts.index("three\n") < texts.index("five\n")
    assert texts[-1] == "again\n"
    assert seen[-1].kind == "end"
    assert seen[-1].data["state"] == "CANCELLED"


def test_follow_continues_behind_an_id_without_loss_or_doubling(server: Running) -> None:
    logs = Logs(server, ranks=2)
    for rank in (0, 1):
        logs.write(b"".join(b"line %d\n" % n for n in range(20)), rank)
    logs.write(b"next\n", generation=1)
    logs.end()
    whole = [event for event in logs.follow() if event.kind == "log"]
    assert len(whole) == 41
    for at in (0, 7, 19, 20, 33, 39, 40):
        rest = [event.data for event in logs.follow(whole[at].id) if event.kind == "log"]
        assert rest == [event.data for event in whole[at + 1 :]]


def test_what_rotation_removed_is_told(server: Running) -> None:
    logs = Logs(server)
    logs.write(b"still here\n")
    logs.end()
    events = list(logs.follow("a1.g0:0=999999999.5"))
    assert [event.data["text"] for event in events if event.kind == "log"] == [SKIPPED, "still here\n"]


def test_storage_that_became_something_else_is_told_before_the_stream_begins(server: Running) -> None:
    logs = Logs(server)
    logs.folder.parent.mkdir(parents=True)
    logs.folder.touch()
    assert logs.read() == ""
    logs.folder.unlink()
    logs.folder.symlink_to(logs.folder)
    answer = server.http.get(f"/api/v1/jobs/{logs.id}/logs")
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")


def test_ranks_that_start_anew_are_told(server: Running) -> None:
    logs = Logs(server)
    told: list[int] = []

    def watch() -> None:
        told.extend(event.data["generation"] for event in logs.follow() if event.kind == "job")

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not told:
        time.sleep(0.01)
    logs._save(generation=10)
    while len(told) < 2:
        time.sleep(0.01)
    logs.end()
    watcher.join()
    assert told[:2] == [9, 10]


def test_text_follow_ends_with_the_job(server: Running) -> None:
    logs = Logs(server)
    logs.write(b"all\n")
    logs.end()
    assert logs.read(follow=True, rank=0) == "all\n"


def test_logs_that_cannot_be(server: Running) -> None:
    logs = Logs(server)
    path = f"/api/v1/jobs/{logs.id}/logs"
    assert logs.read() == ""
    assert server.http.get(path, params={"rank": 1}).json()["code"] == "rank_not_found"
    assert server.http.get(path, params={"generation": 10}).json()["code"] == "generation_not_found"
    for query in ("tail=-1", "tail=x", "tail=10001", "rank=-1", "generation=-1", "follow=perhaps"):
        answer = server.http.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, query.split("=")[0])
    assert server.http.get(path, headers={"Last-Event-ID": "../../x"}).json()["errors"][0]["field"] == "Last-Event-ID"


def test_only_logs_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "a1" / "g0"
    folder.mkdir(parents=True)
    for name in ("rank-0.log", "rank-0.log.1", "rank-x.log", "secret", "rank-1.log.tmp"):
        (folder / name).write_bytes(b"1")
    (folder / "rank-7.log").mkdir()
    (tmp_path / "logs" / "b2").mkdir()
    store = LogStore(str(tmp_path))
    assert store.generations() == [(1, 0)]
    found = {rank: [Path(part.path).name for part in parts] for rank, parts in store.ranks(1, 0).items()}
    assert found == {0: ["rank-0.log.1", "rank-0.log"]}
    assert LogStore(str(tmp_path / "nothing")).generations() == []


def test_cut() -> None:
    assert cut(b"a\nb\nc", flush=False) == [b"a\n", b"b\n"]
    assert cut(b"a\nb\nc", flush=True) == [b"a\n", b"b\n", b"c"]
    assert cut(b"", flush=True) == []
    stuck = b"\x80" * (LONGEST_LINE + 5)  # never a border of a character: still moves on
    assert b"".join(cut(stuck, flush=True)) == stuck


def test_cursor_round_trip() -> None:
    cursor = Cursor(3, 12, {0: Position("123", 45), 7: Position("n0", 0)})
    assert parse_cursor(str(cursor)) == cursor
    assert parse_cursor(str(Cursor(0, 0))) == Cursor(0, 0)
    assert json.dumps(str(cursor)) == '"a3.g12:0=123.45,7=n0.0"'
