"""Code bundles: zips that are named by their sha256."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import anyio.from_thread
import anyio.to_thread
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel

from api.context import Here
from api.errors import ApiProblem, documented
from orchestrator.adapters.storage.bundles import MAX_PACKED
from orchestrator.adapters.storage.zipcheck import MAX_ENTRIES, MAX_UNPACKED

router = APIRouter(prefix="/bundles", tags=["bundles"])
Sha = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="sha256 of the zip's bytes, 64 lower-case hex digits.")]
LIMITS = f"{MAX_PACKED // 1024**2} MiB packed, {MAX_UNPACKED // 1024**2} MiB unpacked, {MAX_ENTRIES} entries"


class BundleOut(BaseModel):
    """A bundle that can be named in a job spec."""

    bundle: str


@router.put(
    "/{sha256}", summary="Upload a code bundle", responses=documented(413, 422),
    description=f"A zip of regular files with relative paths; at most {LIMITS}. Counted on the bytes that come. Idempotent.",
    openapi_extra={"requestBody": {"required": True, "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}},
)  # fmt: skip
async def put(here: Here, request: Request, sha256: Sha) -> BundleOut:
    # The bundle is hashed, checked and stored by a thread, which pulls the chunks out of this event loop one by one.
    await anyio.to_thread.run_sync(here.bundles.put, sha256, _pulled(request.stream().__aiter__()))
    return BundleOut(bundle=sha256)


def _pulled(chunks: AsyncIterator[bytes]) -> Iterator[bytes]:
    async def following() -> bytes | None:
        return await anext(chunks, None)

    while (chunk := anyio.from_thread.run(following)) is not None:
        yield chunk


@router.head("/{sha256}", summary="Is a bundle there?", responses=documented(404, 422))
def head(here: Here, sha256: Sha) -> Response:
    """200 when it is, 404 when not."""
    if not here.bundles.exists(sha256):
        raise ApiProblem(404, "bundle_not_found", f"no bundle {sha256}; upload it with PUT")
    return Response()
