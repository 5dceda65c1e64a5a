"""The bearer token, asked for before anything else of a request is looked at.

Invariants: only OPEN paths answer without a token, unknown paths included; the comparison takes the same time whatever is wrong; the
token is taken from the Authorization header only, so it never lands in an access log.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api import errors

OPEN = frozenset({"/healthz", "/readyz"})


class BearerToken:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN) or self._authentic(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            what = "that is not this server's token" if "authorization" in Headers(scope=scope) else "no token came"
            detail = f"{what}: send `Authorization: Bearer <token>`; it is in the file `token` of the server's state folder"
            refusal = errors.answer(401, "not_authenticated", detail, headers={"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
        else:  # a websocket
            await send({"type": "websocket.close", "code": 1008})

    def _authentic(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return hmac.compare_digest(given.strip(" \t").encode("latin-1"), self._expected) and scheme.lower() == "bearer"
