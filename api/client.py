"""The HTTP client of the CLI.

Invariants: a request is repeated only where repeating cannot do the work twice, a submit always under one Idempotency-Key; the token goes
to the server's address only.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import httpx

from api import server_record
from api.server_record import ServerDown

TRIES = 4
PREFIX = "/api/v1"
CHUNK = 256 * 1024
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class ApiError(Exception):
    """The server refused; ``problem`` is its problem+json."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(problem.get("detail", "the server refused"))
        self.problem = problem

    @property
    def code(self) -> str:
        return str(self.problem.get("code", ""))

    def lines(self) -> list[str]:
        """One line for each bad field, else one for all."""
        fields = self.problem.get("errors") or []
        return [f"{e['field']}: {e['message']}" if e["field"] else e["message"] for e in fields] or [str(self)]


@dataclass(frozen=True)
class LogEvent:
    """One event of a followed log: kind ``log`` or ``end``, its data, and the id to continue from."""

    kind: str
    data: dict[str, Any]
    id: str


class Client:
    """Talks to one server. Raises ServerDown when nothing answers, ApiError when it refuses."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        local = urlsplit(address).hostname in LOOPBACK  # a proxy from the environment could not reach it
        self._http = httpx.Client(
            base_url=address, headers={"Authorization": f"Bearer {token}"}, timeout=httpx.Timeout(30.0, connect=5.0), trust_env=not local
        )

    @classmethod
    def find(cls, state_dir: Path | None = None) -> Client:
        """The server of the environment or the state folder. Raises ServerDown."""
        return cls(*server_record.find(state_dir))

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        return self._send("GET", path, params=given).json()

    def post(self, path: str, body: dict[str, Any] | None = None, key: str | None = None, **options: Any) -> Any:
        """``key``: the Idempotency-Key; without one the call itself must be idempotent, or is not repeated."""
        headers = {"Content-Type": "application/json", **({"Idempotency-Key": key} if key else {})}
        tries = TRIES if key else 1
        return self._send("POST", path, content=json.dumps(body or {}).encode(), headers=headers, tries=tries, **options).json()

    def delete(self, path: str) -> None:
        self._send("DELETE", path, tries=1, timeout=300.0)

    def submit(self, spec: dict[str, Any]) -> Any:
        return self.post("/jobs", spec, key=uuid.uuid4().hex)

    def every(self, path: str, **params: Any) -> Iterator[Any]:
        """All items of a list, page by page."""
        cursor = None
        while True:
            page = self.get(path, cursor=cursor, **params)
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def upload(self, sha256: str, file: IO[bytes]) -> None:
        """Send a bundle, unless the server has it."""
        path = f"/bundles/{sha256}"
        if self._send("HEAD", path, refuse=False).status_code == 200:
            return

        def chunks() -> Iterator[bytes]:
            file.seek(0)
            while chunk := file.read(CHUNK):
                yield chunk

        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                self._send("PUT", path, content=chunks(), timeout=300.0, tries=1)
                return
            except (ServerDown, ApiError) as error:
                if last or (isinstance(error, ApiError) and error.problem.get("status") != 503):
                    raise
                time.sleep(0.5 * 2**attempt)

    @contextmanager
    def stream_text(self, path: str, **params: Any) -> Iterator[Iterator[str]]:
        """The body as text, as it comes."""
        given = {name: value for name, value in params.items() if value is not None}
        with self._connected(), self._http.stream("GET", PREFIX + path, params=given) as response:
            self._refused(response)
            yield response.iter_text()

    def download(self, path: str, into: IO[bytes]) -> None:
        """Write the body as it comes. Raises ServerDown where it breaks off."""
        with self._connected(), self._http.stream("GET", PREFIX + path, timeout=httpx.Timeout(5.0, read=None)) as response:
            self._refused(response)
            for chunk in response.iter_bytes():
                into.write(chunk)

    def follow(self, path: str, since: str | None, **params: Any) -> Iterator[LogEvent]:
        """Events of a log or of a history from behind ``since`` on. Raises ServerDown when the stream breaks before its end."""
        given = {name: value for name, value in params.items() if value is not None}
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": since} if since else {})}
        timeout = httpx.Timeout(5.0, read=None)
        with (
            self._connected(),
            self._http.stream("GET", PREFIX + path, params={**given, "follow": True}, headers=headers, timeout=timeout) as response,
        ):
            self._refused(response)
            yield from _events(response.iter_lines())

    def _send(self, method: str, path: str, tries: int = TRIES, refuse: bool = True, **request: Any) -> httpx.Response:
        arrived = False  # a request whose answer was lost may have been carried out
        for attempt in range(tries):
            last = attempt == tries - 1
            try:
                with self._connected():
                    response = self._http.request(method, PREFIX + path, **request)
            except ServerDown as error:
                arrived = arrived or not error.nothing_listens
                if last and arrived and method in ("POST", "DELETE"):
                    raise ServerDown(f"{error.what}; it may have done what was asked, look with `keepstep ls`", False) from error
                if last or not arrived:
                    raise
            else:
                if response.status_code != 503 or last:
                    if refuse:
                        self._refused(response)
                    return response
            time.sleep(0.3 * 2**attempt)
        raise AssertionError("tries is at least 1")

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            refused = isinstance(error, httpx.ConnectError)
            raise ServerDown(f"the server at {self.address} does not answer ({error})", nothing_listens=refused) from error

    @staticmethod
    def _refused(response: httpx.Response) -> None:
        if response.status_code < 400:
            return
        response.read()
        try:
            problem = response.json()
            assert isinstance(problem, dict)
        except (ValueError, AssertionError):
            problem = {"status": response.status_code, "code": "refused", "detail": f"HTTP {response.status_code}: {response.text[:200]}"}
        raise ApiError(problem)


def ref_path(ref: str, *rest: str) -> str:
    """Path of a job by id or name, whatever characters the name has. Raises ApiError for what no path can hold, and no job is called."""
    if ref in ("", ".", ".."):
        detail = f"no job has the id or name {ref!r}; `keepstep ls` lists them"
        raise ApiError({"status": 404, "code": "job_not_found", "detail": detail})
    return "/".join(["/jobs", quote(ref, safe=""), *rest])


def _events(lines: Iterator[str]) -> Iterator[LogEvent]:
    kind, data, ident = "", "", ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            data = value
        elif name == "id":
            ident = value
        elif not line and data:
            yield LogEvent(kind, json.loads(data), ident)
            kind, data = "", ""
