"""The HTTP application: routes, errors, token, OpenAPI.

Invariant: building it starts nothing and touches neither database nor cluster.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from api import errors
from api.auth import BearerToken
from api.context import Context
from api.routes import bundles, checkpoints, health, history, jobs, logs, metrics, nodes

PREFIX = "/api/v1"
ABOUT = """Runs training jobs on a cluster and keeps them in step when processes, GPUs and nodes fail.

Times are ISO 8601 in UTC. Errors are `application/problem+json` with a stable `code`. Every list answers
`{"items": [...], "next_cursor": null}`. Send `Authorization: Bearer <token>` with every call but `/healthz` and `/readyz`."""


def create_app(context: Context, token: str) -> FastAPI:
    """The application over a context; every call but the health checks needs ``token``."""
    app = FastAPI(title="KeepStep", version=version("keepstep"), description=ABOUT, redoc_url=None)
    app.state.context = context
    errors.install(app)
    app.add_middleware(BearerToken, token=token)
    app.include_router(health.router)
    app.include_router(metrics.router)
    for router in (jobs.router, history.router, checkpoints.router, logs.router, nodes.router, bundles.router):
        app.include_router(router, prefix=PREFIX, responses=errors.documented())
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's own description, plus the token and the models whose bodies the routes read themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = schema.setdefault("components", {})
        wanted = [(model, "validation") for model in (*jobs.component_models(), errors.Problem)]
        _, definitions = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        components.setdefault("schemas", {}).update(definitions["$defs"])
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
        for path in ("/healthz", "/readyz"):
            schema["paths"][path]["get"]["security"] = []
        app.openapi_schema = schema
    return app.openapi_schema
