"""Quire: an LLM inference and serving engine on a paged KV cache.

Names are imported on first use, so that `import quire` costs milliseconds and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "quire.llm",
    "LLMEngine": "quire.frontend.llm_engine",
    "AsyncLLM": "quire.frontend.async_engine",
    "EngineArgs": "quire.config.engine_args",
    "AsyncEngineArgs": "quire.config.engine_args",
    "EngineOptions": "quire.config.typed_options",
    "ModelRegistry": "quire.models.registry",
    "TextPrompt": "quire.types.prompts",
    "TokensPrompt": "quire.types.prompts",
    "EmbedsPrompt": "quire.types.prompts",
    "PromptType": "quire.types.prompts",
    "LoRARequest": "quire.types.adapter",
    "SamplingParams": "quire.types.sampling",
    "BeamSearchParams": "quire.types.sampling",
    "RequestOutputKind": "quire.types.sampling",
    "StructuredOutputsParams": "quire.types.structured",
    "RepetitionDetectionParams": "quire.types.repetition",
    "LogitsProcessor": "quire.worker.sampling.plugins",
    "StatLogger": "quire.observe.stat_logger",
    "RequestOutput": "quire.types.output",
    "CompletionOutput": "quire.types.output",
    "Logprob": "quire.types.output",
    "PoolingParams": "quire.types.pooling",
    "PoolingOutput": "quire.types.pooling",
    "PoolingRequestOutput": "quire.types.pooling",
    "EmbeddingOutput": "quire.types.pooling",
    "EmbeddingRequestOutput": "quire.types.pooling",
    "ClassificationOutput": "quire.types.pooling",
    "ClassificationRequestOutput": "quire.types.pooling",
    "ScoringOutput": "quire.types.pooling",
    "ScoringRequestOutput": "quire.types.pooling",
    "EngineConfig": "quire.config.engine",
}

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.config.engine_args import AsyncEngineArgs, EngineArgs
    from quire.config.typed_options import EngineOptions
    from quire.frontend.async_engine import AsyncLLM
    from quire.frontend.llm_engine import LLMEngine
    from quire.llm import LLM
    from quire.models.registry import ModelRegistry
    from quire.observe.stat_logger import StatLogger
    from quire.types.adapter import LoRARequest
    from quire.types.output import CompletionOutput, Logprob, RequestOutput
    from quire.types.pooling import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.types.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from quire.types.repetition import RepetitionDetectionParams
    from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
    from quire.types.structured import StructuredOutputsParams
    from quire.worker.sampling.plugins import LogitsProcessor

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineConfig",
    "EngineOptions",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StatLogger",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
