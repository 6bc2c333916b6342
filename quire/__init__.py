"""Quire: an LLM inference and serving engine on a paged KV cache.

Names are imported on first use, so that `import quire` costs milliseconds and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.frontend.async_engine",
    "SamplingParams": "quire.types.sampling",
    "BeamSearchParams": "quire.types.sampling",
    "RequestOutputKind": "quire.types.sampling",
    "StructuredOutputsParams": "quire.types.structured",
    "RequestOutput": "quire.types.output",
    "CompletionOutput": "quire.types.output",
    "Logprob": "quire.types.output",
    "EngineConfig": "quire.config.engine",
}

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.frontend.async_engine import AsyncLLM
    from quire.llm import LLM
    from quire.types.output import CompletionOutput, Logprob, RequestOutput
    from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
    from quire.types.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
