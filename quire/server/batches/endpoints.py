"""/v1/batches: many requests in a file, answered in the background."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from msgspec import to_builtins
from pydantic import Field, model_validator

from quire.foundation.errors import InputError
from quire.server.batches.files import queue_of
from quire.server.batches.paging import page
from quire.server.http.body import Body, openapi_body, read_body
from quire.server.responses.body import check_metadata

router = APIRouter()


class BatchBody(Body):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: str = Field("24h", pattern=r"^[1-9][0-9]{0,4}[mhd]$")  # nothing is dropped when it is over
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _check(self) -> BatchBody:
        check_metadata(self.metadata or {})
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("output_expires_after"):
            raise InputError("output_expires_after is not supported: files do not expire here", "output_expires_after")
        return data


@router.post("/v1/batches", openapi_extra=openapi_body(BatchBody))
async def create(request: Request) -> Response:
    body = await read_body(request, BatchBody)
    request.app.state.service.running()
    batch = await queue_of(request).create(body.endpoint, body.input_file_id, body.completion_window, body.metadata)
    return JSONResponse(to_builtins(batch))


@router.get("/v1/batches")
async def batches(request: Request, after: str | None = None, limit: int = Query(20, ge=1, le=100)) -> Response:
    queue = queue_of(request)
    known = [queue.get(batch_id) for batch_id in queue.store().batches]
    return JSONResponse(page(known, after, limit))


@router.get("/v1/batches/{batch_id}")
async def retrieve(request: Request, batch_id: str) -> Response:
    return JSONResponse(to_builtins(queue_of(request).get(batch_id)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(request: Request, batch_id: str) -> Response:
    queue = queue_of(request)
    batch = queue.get(batch_id)
    queue.cancel(batch)
    return JSONResponse(to_builtins(batch))
