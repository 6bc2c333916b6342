"""/v1/files: the input and output of batches."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from msgspec import to_builtins
from starlette.datastructures import UploadFile

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.server.batches.paging import page
from quire.server.batches.queue import BatchQueue
from quire.server.batches.store import File
from quire.server.http.errors import ApiError

router = APIRouter()
MAX_NAME = 256  # characters of a file's name
MAX_FIELDS = 8  # of the form


def queue_of(request: Request) -> BatchQueue:
    queue: BatchQueue = request.app.state.batches
    return queue


def file_of(request: Request, file_id: str) -> File:
    """Raises ApiError 404."""
    file = queue_of(request).store().files.get(file_id)
    if file is None:
        raise ApiError(404, f"there is no file with the id {file_id[:256]!r}", "file_id")
    return file


@router.post("/v1/files")
async def upload(request: Request) -> Response:
    """A multipart form with `purpose` (batch) and `file`."""
    request.app.state.service.running()
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InputError("the content type must be multipart/form-data, with the fields file and purpose")
    async with request.form(max_files=1, max_fields=MAX_FIELDS) as form:
        if form.get("purpose") != "batch":
            raise InputError(f"purpose must be 'batch', got {shown(form.get('purpose'))}", "purpose")
        expiry = next((name for name in form if name.startswith("expires_after")), None)
        if expiry is not None:
            raise InputError("files do not expire here: delete them", "expires_after")
        given = form.get("file")
        if not isinstance(given, UploadFile):
            raise InputError("file is missing: the form needs one, with a filename", "file")
        if not given.size:
            raise InputError("the file is empty", "file")
        store, name = queue_of(request).store(), (given.filename or "file")[:MAX_NAME]
        try:
            file = await asyncio.to_thread(store.upload, given.file, name, "batch")
        except OSError as error:
            raise ApiError(507, f"the file cannot be kept: {error.strerror}") from None
    return JSONResponse(to_builtins(file))


@router.get("/v1/files")
async def files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: int = Query(10_000, ge=1, le=10_000),
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    known = queue_of(request).store().files.values()
    return JSONResponse(page([f for f in known if purpose in (None, f.purpose)], after, limit, order))


@router.get("/v1/files/{file_id}")
async def retrieve(request: Request, file_id: str) -> Response:
    return JSONResponse(to_builtins(file_of(request, file_id)))


@router.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def content(request: Request, file_id: str) -> Response:
    file = file_of(request, file_id)
    path = queue_of(request).store().data(file.id)
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


@router.delete("/v1/files/{file_id}")
async def delete(request: Request, file_id: str) -> Response:
    file, queue = file_of(request, file_id), queue_of(request)
    if queue.uses(file.id):
        raise InputError("a batch still reads the file: cancel it first", "file_id")
    queue.store().delete(file.id)
    return JSONResponse({"id": file.id, "object": "file", "deleted": True})
