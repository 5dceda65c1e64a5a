"""Nodes of the cluster."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api.context import Cursor, Here, Limit
from api.errors import ApiProblem, documented
from api.schemas import NodeOut, Page
from api.slices import page_of

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get("", summary="List nodes", responses=documented(422))
def nodes(here: Here, limit: Limit = 50, cursor: Cursor = None) -> Page[NodeOut]:
    """All nodes of the cluster, lately lost ones included; the head first, then by name."""
    items, following = page_of(sorted(here.service.nodes(), key=lambda n: (not n.head, n.name, n.id)), limit, cursor)
    return Page[NodeOut](items=[NodeOut.of(node) for node in items], next_cursor=following)


@router.get("/{ref}", summary="Get a node", responses=documented(404, 422))
def node(
    here: Here, ref: Annotated[str, Path(min_length=1, max_length=200, description="Node id or name, 1 to 200 characters.")]
) -> NodeOut:
    """By id, or by name."""
    for found in here.service.nodes():
        if ref in (found.id, found.name):
            return NodeOut.of(found)
    raise ApiProblem(404, "node_not_found", f"no node has the id or name {ref!r}; `keepstep nodes` lists them")
