"""Which attention backend serves a model on a device: the first of an ordered list that does not refuse."""

from __future__ import annotations

import importlib
import logging

from quire.attention.base import AttentionBackend, AttentionSpec
from quire.foundation.errors import ConfigError

logger = logging.getLogger(__name__)

BACKENDS = {  # name: where its class lives
    "triton": "quire.attention.triton:TritonAttention",
    "torch_cpu": "quire.attention.torch_cpu:TorchCPUAttention",
}
ORDER = {"cuda": ("triton",), "cpu": ("torch_cpu",)}  # by device type, best first


def select(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first in the device's order that supports `spec`.

    Raises ConfigError for an unknown name, and when every candidate refuses (with each one's reason).
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(
            f"attention_backend={name!r} is unknown; there are: auto, {', '.join(BACKENDS)}", "attention_backend"
        )
    candidates = ORDER.get(spec.device.type, ()) if name == "auto" else (name,)
    refusals = []
    for candidate in candidates:
        module, _, attribute = BACKENDS[candidate].partition(":")
        backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
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
