"""Checkpoints of a job: list, verify, pin, download."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from api.context import Cursor, Here, Limit, Ref
from api.errors import documented
from api.schemas import CheckpointOut, Page

router = APIRouter(prefix="/jobs/{ref}/checkpoints", tags=["checkpoints"], responses=documented(404, 422))
Step = Annotated[int, Path(ge=0, lt=2**63, description="Step of the checkpoint, 0 to 2^63 - 1; of several, the newest is meant.")]


@router.get("", summary="Checkpoints of a job")
def checkpoints(here: Here, ref: Ref, limit: Limit = 50, cursor: Cursor = None) -> Page[CheckpointOut]:
    """Newest first, with what was found when their bytes were last read."""
    items, following = here.service.checkpoints(ref, limit, cursor)
    return Page[CheckpointOut](items=[CheckpointOut.of(record) for record in items], next_cursor=following)


@router.post("/{step}/verify", summary="Read a checkpoint and check every byte")
def verify(here: Here, ref: Ref, step: Step) -> CheckpointOut:
    """Answers when all is read, which may take minutes. `problem` tells what does not hold; a damaged one is never restored."""
    return CheckpointOut.of(here.service.verify_checkpoint(ref, step))


@router.post("/{step}/pin", summary="Keep a checkpoint from retention")
def pin(here: Here, ref: Ref, step: Step) -> CheckpointOut:
    """Idempotent."""
    return CheckpointOut.of(here.service.pin_checkpoint(ref, step, pinned=True))


@router.post("/{step}/unpin", summary="Let retention remove a checkpoint again")
def unpin(here: Here, ref: Ref, step: Step) -> CheckpointOut:
    """Idempotent."""
    return CheckpointOut.of(here.service.pin_checkpoint(ref, step, pinned=False))


@router.get(
    "/{step}/download", summary="Download a checkpoint", response_class=StreamingResponse,
    responses={200: {"description": "A tar of the manifest and the safetensors files", "content": {"application/x-tar": {}}},
               **documented(409)},
)  # fmt: skip
def download(here: Here, ref: Ref, step: Step) -> StreamingResponse:
    """Every byte is verified on the way; where one does not hold, the stream ends before `Content-Length` is reached."""
    record, archive = here.service.checkpoint_archive(ref, step)
    name = f"{record.job_id}-step-{step}.tar"
    headers = {"Content-Length": str(archive.size), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(archive.chunks, media_type="application/x-tar", headers=headers)
