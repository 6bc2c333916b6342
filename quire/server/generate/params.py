"""From the fields of a request to SamplingParams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quire.foundation.errors import InputError
from quire.frontend.structured import GUIDED, wished
from quire.server.generate.protocol import GenerationBody
from quire.types.sampling import MAX_BIAS, RequestOutputKind, SamplingParams

PLAIN = (
    "n",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "repetition_detection",
    "logits_processors",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
NAMES = {"extra_args": "vllm_xargs"}  # what clients of every API call the fields of SamplingParams
WITH_MODEL_DEFAULT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(
    body: GenerationBody,
    model_defaults: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """What the client asked, else what the model's generation_config.json says, else the usual defaults.

    Raises InputError naming the field that is out of range.
    """
    values = {name: getattr(body, name) for name in PLAIN}
    for name in WITH_MODEL_DEFAULT:
        value = getattr(body, name)
        value = model_defaults.get(name) if value is None else value
        if value is not None:
            values[name] = value
    if body.use_beam_search:
        values["temperature"] = 1.0  # greedy would allow but one answer; nothing is sampled
    values["extra_args"] = body.vllm_xargs
    guided = {name: getattr(body, name) for name in GUIDED}
    with field_names(NAMES):
        return SamplingParams(
            **values,
            structured_outputs=wished(body.response_format, body.structured_outputs, guided),
            stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
            logit_bias=_logit_bias(body.logit_bias),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        )


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InputError name the field as the client wrote it."""
    try:
        yield
    except InputError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        message = error.message.removeprefix(str(error.param))
        raise type(error)(f"{name}{message}" if message != error.message else f"{name}: {message}", name) from None


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """Beyond the largest bias there is nothing more to say, so larger ones are cut to it."""
    if given is None:
        return None
    bias = {}
    for key, value in given.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 10:
            raise InputError(f"logit_bias has the key {key[:40]!r}, which is not a token id", "logit_bias")
        bias[int(key)] = max(-MAX_BIAS, min(MAX_BIAS, value))
    return bias
