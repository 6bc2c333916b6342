"""Which attention backend serves a model: the first of an ordered list that does not refuse."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from quire.attention.base import AttentionBackend, AttentionSpec, PromptAttention
from quire.config.attention import ATTENTION_BACKENDS, PROMPT_ATTENTION_BACKENDS
from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry

logger = logging.getLogger(__name__)

# By platform, best first; a platform that is not here has plain torch's. Others' libraries are for whoever asks for
# them, as long as `benchmarks/kernels.py --only backends` shows none to be faster.
ORDER = {"cuda": ("triton", "triton_mla", "sdpa"), "cpu": ("torch_cpu", "sdpa")}
PROMPT_ORDER = {"cuda": ("triton", "sdpa")}
PLAIN = ("sdpa",)


def select(name: str, spec: AttentionSpec, platform: str | None = None) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first in the platform's order that supports `spec`.

    platform: by its name; None: the one that is called like the device.
    Raises ConfigError for an unknown name, and when every candidate refuses (with each one's reason).
    """
    found: AttentionBackend = _select(name, spec, platform, ATTENTION_BACKENDS, ORDER)
    return found


def select_for_prompts(name: str, spec: AttentionSpec, platform: str | None = None) -> PromptAttention:
    """The same for encoders."""
    found: PromptAttention = _select(name, spec, platform, PROMPT_ATTENTION_BACKENDS, PROMPT_ORDER)
    return found


def _select(
    name: str, spec: AttentionSpec, platform: str | None, backends: Registry, order: Mapping[str, Sequence[str]]
) -> Any:
    if name != "auto" and name not in backends:
        known = ", ".join(backends)
        raise ConfigError(f"attention_backend={name!r} is unknown; there are: auto, {known}", "attention_backend")
    platform = platform or spec.device.type
    wanted = order.get(platform, PLAIN) if name == "auto" else (name,)
    for candidate in wanted:
        backend = backends.get(candidate)
        reason = backend.refuses(spec)
        if reason is None:
            logger.info("attention backend: %s", candidate)
            return backend(spec)
        logger.info("attention backend %s refused: %s", candidate, reason)
    refusals = [f"{one} ({_refusal(backends, one, spec)})" for one in dict.fromkeys([*wanted, *backends])]
    raise ConfigError(
        f"attention_backend={name}: nothing serves this model on {platform} ({spec.device.type}): "
        + "; ".join(refusals),
        "attention_backend",
    )


def _refusal(backends: Registry, name: str, spec: AttentionSpec) -> str:
    """For an error that names all there are: one that breaks must not hide it."""
    try:
        reason: str | None = backends.get(name).refuses(spec)
    except Exception as error:
        return f"cannot be asked: {error}"
    return reason or "would serve it, if it were asked for"
