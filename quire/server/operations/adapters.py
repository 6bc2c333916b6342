"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, where the options allow it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from quire.foundation.errors import InputError
from quire.foundation.shown import clipped
from quire.server.http.body import Body, openapi_body, read_body
from quire.server.http.errors import ApiError
from quire.server.service import Service
from quire.types.adapter import LoRARequest

router = APIRouter()
_INVALID = "InvalidUserInput"


class LoadBody(Body):
    lora_name: Annotated[str, Field(max_length=256)] = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False  # the tensors' shapes say it


class UnloadBody(Body):
    lora_name: Annotated[str, Field(max_length=256)] = ""
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter", openapi_extra=openapi_body(LoadBody))
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter; its name is a model's from then on."""
    body = await read_body(request, LoadBody)
    service: Service = request.app.state.service
    engine = service.running()
    if not body.lora_name or not body.lora_path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", kind=_INVALID)
    if body.lora_name in service.names:
        raise ApiError(400, f"'{body.lora_name}' is the name of the base model.", kind=_INVALID)
    known = engine.adapters.named(body.lora_name)
    if known is not None and not body.load_inplace:
        raise ApiError(
            400, f"The lora adapter '{body.lora_name}' has already been loaded. To replace it, set 'load_inplace'.",
            kind=_INVALID,
        )  # fmt: skip
    if not Path(body.lora_path).expanduser().is_dir():
        raise ApiError(404, f"The path '{clipped(body.lora_path, 256)}' of the lora adapter does not exist.")
    number = engine.adapters.number_of(body.lora_name)
    try:
        await engine.add_lora(LoRARequest(body.lora_name, number, body.lora_path, load_inplace=body.load_inplace))
    except InputError as error:
        raise ApiError(400, error.message, kind=_INVALID) from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=openapi_body(UnloadBody))
async def unload_lora_adapter(request: Request) -> Response:
    """Forget an adapter. Requests that run with it go on."""
    body = await read_body(request, UnloadBody)
    engine = request.app.state.service.running()
    if not body.lora_name:
        raise ApiError(400, "'lora_name' must be provided.", kind=_INVALID)
    known = engine.adapters.named(body.lora_name)
    if known is None or body.lora_int_id not in (None, known[0].lora_int_id):
        raise ApiError(404, f"The lora adapter '{body.lora_name}' cannot be found.")
    await engine.remove_lora(known[0].lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
