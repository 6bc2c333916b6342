"""Pooling requests: from a prompt to the engine, and from the engine's vectors to what was asked."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from quire.config.pooler import PoolerConfig
from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError, QuireError
from quire.frontend.inputs import PromptLike, check_core, check_labels, checked_ids, read_prompt, tokenize
from quire.frontend.outputs import RequestState
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.adapter import Adapter
from quire.types.pooling import (
    BY_TOKEN,
    EMBED,
    SPARSE_EMBED,
    TOKEN_CLASSIFY,
    TOKEN_EMBED,
    WEIGHTS,
    WHOLE,
    Pooling,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
)
from quire.types.request import EngineRequest, TokenIds
from quire.types.sampling import RequestOutputKind, SamplingParams

_BY_TOKEN = (TOKEN_EMBED, TOKEN_CLASSIFY)
# The core's bookkeeping wants sampling parameters of every request; nothing is ever sampled with these.
_SILENT = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
_SILENT_UNCACHED = _SILENT.clone(skip_reading_prefix_cache=True)


class RefusedError(QuireError):
    """The engine gave up on a request. `reason` is one of the words in `types/output.py`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    token_ids: TokenIds
    second_text: int | None = None  # position where the second text of a pair begins
    cache_salt: str | None = None
    num_keys: int | None = None  # leading tokens that all attend to; None: every one


def check_task(params: PoolingParams, info: EngineInfo, default: str | None = None) -> str:
    """The task that `params` mean for this model: what they say, `default`, or what it was made for.

    Raises InputError if it cannot, or not with these options.
    """
    pooler = pooler_of(info)
    task = params.task or default or pooler.tasks[0]
    if task not in pooler.tasks:
        raise InputError(
            f"task {task!r} is not possible with {info.resolved.info.architecture} as it runs, which can: "
            f"{', '.join(pooler.tasks)}",
            "task",
        )
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, task, pooler)
    return task


def pooler_of(info: EngineInfo) -> PoolerConfig:
    """Raises InputError if the model generates."""
    if info.resolved.pooler is None:
        raise InputError(
            f"{info.resolved.info.architecture} runs for generating and makes no vectors: start it with runner=pooling "
            "(perhaps with convert=embed or convert=classify)",
            "model",
        )
    return info.resolved.pooler


def read(prompt: PromptLike, tokenizer: Tokenizer | None) -> PoolingPrompt:
    given = read_prompt(prompt)
    return PoolingPrompt(tokenize(given, tokenizer), cache_salt=given.cache_salt)


def build(
    prompt: PoolingPrompt,
    params: PoolingParams,
    task: str,
    info: EngineInfo,
    *,
    request_id: str,
    priority: int = 0,
    adapter: Adapter | None = None,
    core: int | None = None,
) -> EngineRequest:
    """task: what `check_task` returned. Raises InputError naming the field that cannot be."""
    check_labels(request_id, priority, prompt.cache_salt)
    check_core(core, info)
    pooler = pooler_of(info)
    if not len(prompt.token_ids):
        raise InputError("prompt must not be empty", "prompt")
    ids = checked_ids(prompt.token_ids, info)
    if len(ids) > info.max_model_len:
        raise InputError(
            f"the prompt has {len(ids)} tokens, more than the {info.max_model_len} of the context (max_model_len); "
            "with truncate_prompt_tokens=-1 it is cut",
            "prompt",
        )
    second_text = prompt.second_text if pooler.pairs_have_types else None
    # What is cached has no states any more: only the last token's are computed anew in any case.
    needs_all = _head(task, pooler) != WHOLE or pooler.mode not in (None, "last") or params.skip_reading_prefix_cache
    return EngineRequest(
        id=request_id,
        token_ids=ids,
        params=_SILENT_UNCACHED if needs_all else _SILENT,
        max_tokens=1,
        priority=priority,
        arrival=time.time(),
        cache_salt=prompt.cache_salt,
        lora=adapter,
        pooling=Pooling(
            head=_head(task, pooler),
            second_text=len(ids) if second_text is None else second_text,
            num_keys=len(ids) if prompt.num_keys is None else prompt.num_keys,
        ),
        core=core,
    )


def output(
    request_state: RequestState, task: str, params: PoolingParams, info: EngineInfo
) -> PoolingRequestOutput[PoolingOutput]:
    """The result of a conversion that has finished. Raises RefusedError if it has no vectors."""
    if request_state.vectors is None:
        answer = request_state.answers[0]
        raise RefusedError(request_state.error or f"the request ended: {answer.finish_reason}", str(answer.stop_reason))
    pooler, ids = pooler_of(info), request_state.prompt_token_ids
    if task == SPARSE_EMBED:
        made = _sparse(request_state.vectors, np.asarray(ids), pooler)
    else:
        data = _of_counted(finish(request_state.vectors, params, pooler, task), np.asarray(ids), task, pooler)
        made = PoolingOutput(data if task in _BY_TOKEN else data[0])
    return PoolingRequestOutput(
        request_id=request_state.request_id,
        outputs=made,
        prompt_token_ids=ids,
        num_cached_tokens=request_state.num_cached_tokens,
    )


def _head(task: str, pooler: PoolerConfig) -> int:
    """Which of the model's heads makes the vectors of a task."""
    if pooler.lexical == "tokens" and task in (TOKEN_CLASSIFY, SPARSE_EMBED):
        return WEIGHTS
    return BY_TOKEN if task in _BY_TOKEN else WHOLE


def _sparse(vectors: np.ndarray, ids: np.ndarray, pooler: PoolerConfig) -> PoolingOutput:
    """vectors: weights of all words [1, vocabulary], or of the prompt's tokens [tokens, 1], the largest of which counts
    where a token stands several times."""
    if pooler.lexical == "vocabulary":
        weights = vectors[0]
    else:
        counts = ~np.isin(ids, pooler.unweighted)
        weights = np.zeros(int(ids.max()) + 1, np.float32)
        np.maximum.at(weights, ids[counts], vectors[counts, 0])
    indices = np.flatnonzero(weights > 0)
    return PoolingOutput(weights[indices], indices.astype(np.int32))


def _of_counted(vectors: np.ndarray, ids: np.ndarray, task: str, pooler: PoolerConfig) -> np.ndarray:
    """Without those of tokens that the model was not made to say anything about."""
    if task not in _BY_TOKEN:
        return vectors
    if pooler.step_token is not None:
        return np.compress(ids == pooler.step_token, vectors, axis=0)
    left_out = pooler.unweighted if task == TOKEN_CLASSIFY else pooler.unweighted[:1]
    return np.compress(~np.isin(ids, left_out), vectors, axis=0) if left_out else vectors


def finish(vectors: np.ndarray, params: PoolingParams, pooler: PoolerConfig, task: str) -> np.ndarray:
    """vectors float32 [n, size] as they left the last layer → cut to the dimensions asked, normalised or activated."""
    if _head(task, pooler) == WEIGHTS:
        return vectors
    if params.dimensions is not None:
        vectors = np.ascontiguousarray(vectors[:, : params.dimensions])
    kind = pooler.activation
    if params.use_activation is False:
        return vectors
    if params.use_activation and kind == "identity":
        kind = "normalize" if pooler.kind == EMBED else "sigmoid" if pooler.size == 1 else "softmax"
    if kind == "normalize":
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    if kind == "sigmoid":
        vectors = 0.5 * (1.0 + np.tanh(0.5 * vectors))  # the same without overflow
    if kind == "softmax":
        powers = np.exp(vectors - vectors.max(axis=1, keepdims=True))
        vectors = powers / powers.sum(axis=1, keepdims=True)
    return vectors


def _check_dimensions(wanted: int, task: str, pooler: PoolerConfig) -> None:
    if task not in (EMBED, TOKEN_EMBED):
        raise InputError(f"dimensions is for embeddings, not for task {task!r}", "dimensions")
    if not pooler.is_matryoshka:
        raise InputError(
            "this model's embeddings cannot be cut: dimensions needs one trained for that (is_matryoshka or "
            "matryoshka_dimensions in config.json or hf_overrides)",
            "dimensions",
        )
    if pooler.matryoshka_dimensions and wanted not in pooler.matryoshka_dimensions:
        allowed = ", ".join(map(str, pooler.matryoshka_dimensions))
        raise InputError(f"dimensions must be one of {allowed}, got {wanted}", "dimensions")
    if wanted > pooler.size:
        raise InputError(f"dimensions must be <= {pooler.size}, got {wanted}", "dimensions")
