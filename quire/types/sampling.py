"""What the user asks of one generation. Frozen: nothing downstream may change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import force_setattr

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.types.repetition import RepetitionDetectionParams
from quire.types.structured import StructuredOutputsParams

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
SMALLEST_TEMPERATURE = 1e-2  # anything between is raised to this, where fp32 softmax is still exact
MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 8 * 1024  # of all stop strings
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 16 * 1024  # of all bad words
MAX_BAD_WORD_TOKENS = 64 * 1024  # of all in bad_words_token_ids: each word is there as it begins a text and in it
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MAX_LISTED_LOGPROBS = 128
MAX_EXTRA_BYTES = 64 * 1024  # of extra_args as JSON


_IDS = list[Annotated[int, msgspec.Meta(ge=0)]]


class RequestOutputKind(IntEnum):
    """What each streamed output holds: everything so far, the news only, or nothing until the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, got {shown(value)}", name)
    if value < low or value > high or (open_low and value == low):
        left = "(" if open_low else "["
        raise InputError(f"{name} must be in {left}{low:g}, {high:g}], got {shown(value)}", name)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {shown(value)}", name)
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InputError(f"{name} must be {limit}, got {shown(value)}", name)


def _check_words(name: str, words: Sequence[Any], most: int, most_units: int, unit: str) -> None:
    if len(words) > most:
        raise InputError(f"{name} may hold at most {most} words, got {len(words)}", name)
    if (size := sum(map(len, words))) > most_units:
        raise InputError(f"{name} may hold at most {most_units} {unit} in all, got {size}", name)


def _token_ids(name: str, ids: list[int]) -> None:
    """Of a list that may be as long as the vocabulary."""
    try:
        msgspec.convert(ids, _IDS)
    except msgspec.ValidationError:
        for token in ids:
            _integer(name, token, 0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling options of one request, with the field's usual names and defaults.

    Raises `InputError` naming the field when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # whose log-probabilities are wanted, instead of the likeliest tokens'
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)  # filled by the frontend
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # params or a dict of them
    repetition_detection: RepetitionDetectionParams | None = None  # params or a dict of them
    extra_args: dict[str, Any] | None = None  # plain data for the engine's own logits processors
    logits_processors: Any = None  # refused with a pointer: processors belong to the engine

    def __post_init__(self) -> None:
        self._normalize()
        self._validate()

    def _normalize(self) -> None:
        if self.stop is None or isinstance(self.stop, str):
            force_setattr(self, "stop", [self.stop] if self.stop else [])
        for name in ("stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                force_setattr(self, name, [])
        if isinstance(self.structured_outputs, dict):
            force_setattr(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if isinstance(self.repetition_detection, dict):
            force_setattr(self, "repetition_detection", RepetitionDetectionParams.of(self.repetition_detection))
        if self.logprob_token_ids is not None and self.logprobs is None:
            force_setattr(self, "logprobs", 0)
        if self.seed == -1:
            force_setattr(self, "seed", None)
        if self.top_k == -1:
            force_setattr(self, "top_k", 0)
        if isinstance(self.temperature, int | float) and GREEDY_BELOW <= self.temperature < SMALLEST_TEMPERATURE:
            force_setattr(self, "temperature", SMALLEST_TEMPERATURE)

    def _validate(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens must be <= max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)
        self._validate_lists()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            got = type(self.structured_outputs).__name__
            raise InputError(f"structured_outputs must be StructuredOutputsParams, got {got}", "structured_outputs")
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            got = type(self.repetition_detection).__name__
            raise InputError(
                f"repetition_detection must be RepetitionDetectionParams, got {got}", "repetition_detection"
            )
        self._validate_extras()
        if self.n > 1 and self.is_greedy:
            raise InputError("n must be 1 when temperature is 0 (greedy), got " + str(self.n), "n")

    def _validate_lists(self) -> None:
        if not isinstance(self.stop, list) or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError("stop must be a string or a list of non-empty strings", "stop")
        if len(self.stop) > MAX_STOPS:
            raise InputError(f"stop may hold at most {MAX_STOPS} strings, got {len(self.stop)}", "stop")
        if (size := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            raise InputError(f"stop may hold at most {MAX_STOP_CHARS} characters in all, got {size}", "stop")
        if self.stop and not self.detokenize:
            raise InputError("stop strings need detokenize=True", "stop")
        if len(self.stop_token_ids) > MAX_STOPS:
            got = len(self.stop_token_ids)
            raise InputError(f"stop_token_ids may hold at most {MAX_STOPS} ids, got {got}", "stop_token_ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InputError("allowed_token_ids must not be empty", "allowed_token_ids")
            _token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logprob_token_ids is not None:
            if not 0 < len(self.logprob_token_ids) <= MAX_LISTED_LOGPROBS:
                raise InputError(
                    f"logprob_token_ids must hold 1 to {MAX_LISTED_LOGPROBS} ids, got {len(self.logprob_token_ids)}",
                    "logprob_token_ids",
                )
            for token in self.logprob_token_ids:
                _integer("logprob_token_ids", token, 0)
        if not isinstance(self.bad_words, list) or not all(isinstance(w, str) and w for w in self.bad_words):
            raise InputError("bad_words must be a list of non-empty strings", "bad_words")
        _check_words("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, "characters")
        _check_words("bad_words_token_ids", self.bad_words_token_ids, 4 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, "tokens")
        if self.logit_bias is not None:
            if (got := len(self.logit_bias)) > MAX_BIASED_TOKENS:
                raise InputError(f"logit_bias may hold at most {MAX_BIASED_TOKENS} tokens, got {got}", "logit_bias")
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0)
                _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)

    def _validate_extras(self) -> None:
        if self.logits_processors is not None:
            raise InputError(
                "logits_processors belong to the engine: LLM(logits_processors=[...]) or quire serve "
                "--logits-processors; a request gives them arguments in extra_args",
                "logits_processors",
            )
        if self.extra_args is None:
            return
        if not isinstance(self.extra_args, dict) or not all(isinstance(key, str) for key in self.extra_args):
            raise InputError("extra_args must be a dict with strings as keys", "extra_args")
        try:
            size = len(msgspec.json.encode(self.extra_args))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"extra_args must hold plain data (as JSON does): {error}", "extra_args") from None
        if size > MAX_EXTRA_BYTES:
            raise InputError(f"extra_args may take {MAX_EXTRA_BYTES} bytes as JSON, got {size}", "extra_args")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed (checked again)."""
        return msgspec.structs.replace(self, **changes)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `LLM.beam_search`; score = cumulative logprob / length ** length_penalty.

    early_stopping: whether a search ends as soon as `beam_width` answers have ended. False: once what runs, were it to
    end now, could not be better than these; "never": once it could not, however long it gets.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, 64)
        _number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise InputError(
                f"early_stopping must be true, false or 'never', got {shown(self.early_stopping)}", "early_stopping"
            )
        _integer("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0.0, 2.0)
