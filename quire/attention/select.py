"""Which attention backend serves a model on a device: the first of an ordered list that does not refuse."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from quire.attention.base import AttentionBackend, AttentionSpec, PromptAttention
from quire.foundation.errors import ConfigError

logger = logging.getLogger(__name__)

BACKENDS = {  # name: where its class lives
    "triton": "quire.attention.triton:TritonAttention",
    "torch_cpu": "quire.attention.torch_cpu:TorchCPUAttention",
}
ORDER = {"cuda": ("triton",), "cpu": ("torch_cpu",)}  # by device type, best first
PROMPT_BACKENDS = {
    "triton": "quire.attention.prompt_triton:TritonPromptAttention",
    "torch": "quire.attention.prompt_torch:TorchPromptAttention",
}
PROMPT_ORDER = {"cuda": ("triton", "torch"), "cpu": ("torch",)}


def select(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first in the device's order that supports `spec`.

    Raises ConfigError for an unknown name, and when every candidate refuses (with each one's reason).
    """
    found: AttentionBackend = _select(name, spec, BACKENDS, ORDER)
    return found


def select_for_prompts(name: str, spec: AttentionSpec) -> PromptAttention:
    """The same for encoders."""
    found: PromptAttention = _select(name, spec, PROMPT_BACKENDS, PROMPT_ORDER)
    return found


def _select(name: str, spec: AttentionSpec, backends: dict[str, str], order: Mapping[str, Sequence[str]]) -> Any:
    if name != "auto" and name not in backends:
        raise ConfigError(
            f"attention_backend={name!r} is unknown; there are: auto, {', '.join(backends)}", "attention_backend"
        )
    candidates = order.get(spec.device.type, ()) if name == "auto" else (name,)
    refusals = []
    for candidate in candidates:
        module, _, attribute = backends[candidate].partition(":")
        backend = getattr(importlib.import_module(module), attribute)
        reason = backend.refuses(spec)
        if reason is None:
            logger.info("attention backend: %s", candidate)
            return backend(spec)
        logger.info("attention backend %s refused: %s", candidate, reason)
        refusals.append(f"{candidate} ({reason})")
    raise ConfigError(
        f"attention_backend={name}: nothing serves this model on {spec.device.type}: "
        + ("; ".join(refusals) or "there is no backend for it"),
        "attention_backend",
    )
