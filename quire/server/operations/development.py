"""What `server_dev_mode` serves besides: resets for measurements, and what exactly runs here."""

from __future__ import annotations

import os
import platform
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

import quire
from quire.foundation.errors import InputError
from quire.server.service import Service

router = APIRouter()
_SECRETS = ("key", "token", "secret", "password")
_HIDDEN = "(hidden)"
_VARIABLES = ("QUIRE_", "CUDA_", "NCCL_", "OMP_", "GOMP_", "HF_", "PYTORCH_", "TRITON_")  # that say how it runs


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = Query(False), reset_external: bool = Query(False)
) -> Response:
    """Forget all cached KV; with `reset_running_requests` what runs is computed anew."""
    service: Service = request.app.state.service
    if reset_external:
        raise InputError("there is no external cache to reset", "reset_external")
    return JSONResponse({"success": await service.running().reset_prefix_cache(reset_running_requests)})


@router.get("/server_info")
async def server_info(request: Request, config_format: Literal["text", "json"] = Query("text")) -> Response:
    """The options as they came to be, the variables that matter, and the machine. Secrets are left out."""
    service: Service = request.app.state.service
    info = service.running().info
    found = _without_secrets(
        {
            "version": quire.__version__,
            "config": msgspec.to_builtins(info.resolved.config),
            "serve": msgspec.to_builtins(service.serve),
            "resolved": {
                "architecture": info.resolved.info.architecture,
                "device": info.resolved.device,
                "dtype": info.resolved.dtype,
                "kv_dtype": info.resolved.kv_dtype,
                "quantization": info.resolved.config.model.quantization,
                "max_model_len": info.max_model_len,
                "max_num_seqs": info.resolved.max_num_seqs,
                "max_num_batched_tokens": info.resolved.max_num_batched_tokens,
                "depth": info.resolved.depth,
                "executor": info.resolved.executor,
                "notes": list(info.resolved.notes),
            },
            "worker": msgspec.to_builtins(info.report),
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
            "system": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
        }
    )
    if config_format == "json":
        return JSONResponse(found)
    return PlainTextResponse("".join(f"{line}\n" for line in _lines(found)))


def _without_secrets(value: Any, name: str = "") -> Any:
    """Values whose name says that they are secret are hidden, where there are any."""
    if isinstance(value, dict):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    words = name.lower().split("_")
    if value and isinstance(value, str | list) and any(word.rstrip("s") in _SECRETS for word in words):
        return _HIDDEN
    return value


def _lines(found: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict) and value:
            lines += _lines(value, f"{prefix}{name}.")
        else:
            lines.append(f"{prefix}{name} = {value!r}")
    return lines
