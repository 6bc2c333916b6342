"""Prompt and params → EngineRequests. Whatever cannot run is refused here, before the engine hears of it."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from quire.engine.client import EngineInfo
from quire.foundation.errors import ContextLengthError, InputError
from quire.foundation.shown import shown
from quire.frontend import prompt_embeds
from quire.frontend.extra_args import check_extra_args
from quire.frontend.structured import constraint_of
from quire.frontend.text import check_text
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import check_length
from quire.types.adapter import Adapter
from quire.types.request import BACKGROUND, EngineRequest, TokenIds, token_array
from quire.types.sampling import SamplingParams
from quire.types.structured import Constraint

PromptLike = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "prompt_embeds")
_PLACEHOLDER = 0  # the id that stands for a token which is an embedding
_SEED_BITS = 63
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, as token ids, or as both (then the ids count and the text is for show).

    Of one that is embeddings, the ids are placeholders.
    """

    text: str | None = None
    token_ids: TokenIds | None = None
    cache_salt: str | None = None
    constraint: Constraint | None = None  # of the answers
    embeds: np.ndarray | None = None  # float32 [tokens, hidden]


def build(
    prompt: PromptLike | Prompt,
    params: SamplingParams,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    *,
    request_id: str,
    priority: int = 0,
    cache_salt: str | None = None,
    constraint: Constraint | None = None,
    adapter: Adapter | None = None,
    arrival: float | None = None,
    trace: Mapping[str, str] | None = None,
    core: int | None = None,
) -> list[EngineRequest]:
    """One request for each of the `params.n` answers; they share the blocks of the prompt through the prefix cache.

    `constraint`, or the prompt's own, binds each answer; None: what `params.structured_outputs` asks.
    `max_tokens` is cut to what the context leaves, and is never None afterwards. Raises InputError naming the field.
    """
    if not isinstance(params, SamplingParams):
        raise InputError(f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params")
    if info.resolved.pooler is not None:
        raise InputError(
            f"{info.resolved.info.architecture} runs for pooling ({', '.join(info.resolved.pooler.tasks)}) and does "
            "not generate: start a model that can with runner=generate",
            "model",
        )
    check_labels(request_id, priority, cache_salt)
    check_core(core, info)
    prompt = read_prompt(prompt, takes_embeds=True)
    if prompt.embeds is not None:
        _check_embeds(prompt.embeds, params, info)
    if prompt.token_ids is None and tokenizer is not None:
        check_length(tokenizer, prompt.text or "", info.max_model_len, info.max_model_len - 1)
    token_ids = checked_ids(tokenize(prompt, tokenizer), info)
    room = _room(len(token_ids), params, info.max_model_len)
    first = EngineRequest(
        id=request_id,
        token_ids=token_ids,
        params=_resolve_params(params, info, tokenizer),
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop_token_ids=_stop_token_ids(params, info, tokenizer),
        eos_token_id=None if params.ignore_eos else main_eos(info, tokenizer),
        seed=_seed(params, request_id, info.resolved.config.model.seed),
        priority=priority,
        arrival=time.time() if arrival is None else arrival,
        cache_salt=prompt.cache_salt if cache_salt is None else cache_salt,
        lora=adapter,
        constraint=constraint or prompt.constraint or _constraint(params, tokenizer),
        prompt_embeds=prompt.embeds,
        trace=None if trace is None else dict(trace),
        media_hashes=[] if prompt.embeds is None else [prompt_embeds.digest(prompt.embeds)],
        core=core,
    )
    return [first] if params.n == 1 else _fan_out(first, params)


def read_prompt(prompt: PromptLike | Prompt, *, takes_embeds: bool = False) -> Prompt:
    """Any accepted form of a prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or
    {"prompt_embeds": tensor} where these can be used."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if not isinstance(prompt, Mapping):
        return Prompt(token_ids=_read_ids(prompt, "prompt"))
    unknown = [key for key, value in prompt.items() if key not in _PROMPT_KEYS and value is not None]
    if unknown:
        raise InputError(
            f"prompt has the unknown key {shown(unknown[0])}; it may hold {', '.join(_PROMPT_KEYS)}", "prompt"
        )
    text, ids, salt, embeds = (prompt.get(key) for key in _PROMPT_KEYS)
    if isinstance(text, list) and ids is None:
        text, ids = None, text
    if embeds is not None:
        if not takes_embeds:
            raise InputError("prompt_embeds are for generating from a prompt, and not for this", "prompt_embeds")
        if ids is not None:
            raise InputError("give either prompt_embeds or prompt_token_ids", "prompt_embeds")
        embeds = prompt_embeds.read(embeds)
        ids = np.full(len(embeds), _PLACEHOLDER, np.int32)
    if text is None and ids is None:
        raise InputError("prompt must hold 'prompt' (text) or 'prompt_token_ids'", "prompt")
    if text is not None and not isinstance(text, str):
        raise InputError(f"prompt must be a string, got {type(text).__name__}", "prompt")
    _check_salt(salt)
    return Prompt(text, None if ids is None else _read_ids(ids, "prompt_token_ids"), salt, embeds=embeds)


def as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """A list of prompts; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [cast(PromptLike, items)]
    return cast(list[PromptLike], items)


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True) -> TokenIds:
    """The ids of a prompt. Raises InputError for text without a tokenizer and for an empty prompt."""
    ids = prompt.token_ids
    if ids is None:
        if tokenizer is None:
            raise InputError("text prompts need a tokenizer, and skip_tokenizer_init is on: give token ids", "prompt")
        ids = tokenizer.encode(prompt.text or "", add_special_tokens=add_special_tokens)
    if not len(ids):
        raise InputError("prompt must not be empty", "prompt")
    return ids


def main_eos(info: EngineInfo, tokenizer: Tokenizer | None) -> int | None:
    """The end-of-sequence token that leaves stop_reason None: the tokenizer's, else the model's first."""
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return next(iter(info.resolved.info.eos_token_ids), None)


def _read_ids(ids: Any, param: str) -> TokenIds:
    """A copy of any sequence of integers (arrays and tensors too)."""
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
        return ids.copy()
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray):
        raise InputError(f"{param} must be a string or a list of token ids, got {type(ids).__name__}", param)
    try:
        return msgspec.convert(ids, list[int])  # a copy; refuses bools as well
    except msgspec.ValidationError:
        pass  # other integers are, or what is wrong is said better, below
    bad = next((i for i in ids if isinstance(i, bool) or not hasattr(i, "__index__")), None)
    if bad is not None:
        raise InputError(f"{param} must hold integers, got {shown(bad)}", param)
    return [operator.index(i) for i in ids]


def check_labels(request_id: str, priority: int, cache_salt: str | None) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise InputError(f"request_id must be a non-empty string, got {shown(request_id)}", "request_id")
    check_text(request_id, "request_id")
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_whole or not (-MAX_PRIORITY <= priority <= MAX_PRIORITY or priority == BACKGROUND):
        raise InputError(
            f"priority must be an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {shown(priority)}", "priority"
        )
    _check_salt(cache_salt)


def check_core(core: int | None, info: EngineInfo, name: str = "data_parallel_rank") -> None:
    """Raises InputError for the number of a core that there is not. name: what it came as."""
    count = info.resolved.config.runtime.data_parallel_size
    if core is None or (type(core) is int and 0 <= core < count):
        return
    raise InputError(
        f"{name} must be the number of an engine core, in [0, {count - 1}] (data_parallel_size is {count}), "
        f"got {shown(core)}",
        name,
    )


def _check_salt(salt: Any) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise InputError(f"cache_salt must be a non-empty string, got {shown(salt)}", "cache_salt")
    check_text(salt, "cache_salt")


@lru_cache(maxsize=8)
def _ids_below(size: int) -> Any:
    """The type of a list of integers in [0, size): checked several times faster than by `min` and `max`."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=size)]]


def checked_ids(ids: TokenIds, info: EngineInfo) -> np.ndarray:
    """int32 [tokens], at least one. Raises InputError for ids that the model does not have."""
    size = info.report.vocab_size
    try:
        found = token_array(ids)
        low, high = int(found.min()), int(found.max())
    except ValueError:  # wider than int32
        low, high = int(min(ids)), int(max(ids))
    if low < 0 or high >= size:
        raise InputError(f"token ids must be in [0, {size}), got {low if low < 0 else high}", "prompt")
    return found


def _room(num_prompt: int, params: SamplingParams, context: int) -> int:
    """Tokens that the context leaves for the answer."""
    room = context - num_prompt
    if room < max(1, params.min_tokens):
        if room < 1:
            raise ContextLengthError.of(num_prompt, 1, context)
        raise InputError(
            f"min_tokens must be <= {room}, got {params.min_tokens}: the prompt has {num_prompt} tokens, and the "
            f"maximum context length is {context} tokens (max_model_len)",
            "min_tokens",
        )
    return room


def _check_embeds(embeds: np.ndarray, params: SamplingParams, info: EngineInfo) -> None:
    prompt_embeds.check(embeds, info)
    if params.prompt_logprobs is not None:
        raise InputError("prompt_logprobs are of token ids, and prompt_embeds have none", "prompt_logprobs")


def _resolve_params(params: SamplingParams, info: EngineInfo, tokenizer: Tokenizer | None) -> SamplingParams:
    """Params with every open choice decided: -1 log-probabilities, bad words as ids."""
    vocab_size = info.report.vocab_size
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("bad_words_token_ids", [i for word in params.bad_words_token_ids for i in word]),
    ):
        try:
            msgspec.convert(list(ids or ()), _ids_below(vocab_size))
        except msgspec.ValidationError:
            wrong = next((i for i in ids or () if not 0 <= i < vocab_size), None)
            if wrong is not None:
                got = shown(wrong)
                raise InputError(f"{name} must hold token ids in [0, {vocab_size}), got {got}", name) from None
    if params.stop and tokenizer is None:
        raise InputError("stop strings need a tokenizer, and skip_tokenizer_init is on: use stop_token_ids", "stop")
    for stop in params.stop:
        check_text(stop, "stop")
    check_extra_args(params, info)
    changes: dict[str, Any] = {}
    if params.structured_outputs is not None:
        changes["structured_outputs"] = None  # the constraint says it
    for name in ("logprobs", "prompt_logprobs"):
        count = _count_logprobs(name, getattr(params, name), info)
        if count != getattr(params, name):
            changes[name] = count
    if params.prompt_logprobs is not None and not params.skip_reading_prefix_cache:
        changes["skip_reading_prefix_cache"] = True  # cached positions are not computed, so they have no logits
    if params.bad_words:
        changes["bad_words_token_ids"] = params.bad_words_token_ids + _bad_word_ids(params.bad_words, tokenizer)
    return params.clone(**changes) if changes else params


def _constraint(params: SamplingParams, tokenizer: Tokenizer | None) -> Constraint | None:
    if params.structured_outputs is not None and tokenizer is None:
        raise InputError("structured_outputs need a tokenizer, and skip_tokenizer_init is on", "structured_outputs")
    return constraint_of(params.structured_outputs)


def _count_logprobs(name: str, wanted: int | None, info: EngineInfo) -> int | None:
    if wanted is None:
        return None
    limit, vocab_size = info.resolved.config.model.max_logprobs, info.report.vocab_size
    count = vocab_size if wanted == -1 else wanted
    if count > limit != -1:
        raise InputError(f"{name} must be <= {limit} (max_logprobs), got {wanted}", name)
    return min(count, vocab_size)


def _bad_word_ids(words: list[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Each word as it is tokenized at the start of a text and after a space."""
    if tokenizer is None:
        raise InputError("bad_words need a tokenizer, and skip_tokenizer_init is on", "bad_words")
    for word in words:
        check_text(word, "bad_words")
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    found = {tuple(ids): ids for ids in tokenizer.encode_batch(texts, add_special_tokens=False) if ids}
    return list(found.values())


def _stop_token_ids(params: SamplingParams, info: EngineInfo, tokenizer: Tokenizer | None) -> list[int]:
    if params.ignore_eos:
        return list(params.stop_token_ids)
    eos = main_eos(info, tokenizer)
    model_eos = info.resolved.info.eos_token_ids
    return list(dict.fromkeys([*([] if eos is None else [eos]), *model_eos, *params.stop_token_ids]))


def _seed(params: SamplingParams, request_id: str, engine_seed: int) -> int:
    """The user's seed, or one that depends on the engine's seed and the request's id alone."""
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - _SEED_BITS)


def _fan_out(first: EngineRequest, asked: SamplingParams) -> list[EngineRequest]:
    """The n answers; only the first scores the prompt."""
    params = first.params.clone(n=1)
    later = params.clone(prompt_logprobs=None, skip_reading_prefix_cache=asked.skip_reading_prefix_cache)
    return [
        msgspec.structs.replace(
            first,
            id=f"{first.id}#{index}",
            params=later if index else params,
            seed=_child_seed(first.seed, index),
        )
        for index in range(asked.n)
    ]


def _child_seed(seed: int, index: int) -> int:
    """seed + index, kept in the signed 64-bit range."""
    return (seed + index + 2**63) % 2**64 - 2**63
