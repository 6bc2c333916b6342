"""The fields that the endpoints accept: OpenAI's own and the usual extensions of open engines.

Ranges that sampling itself has are checked by SamplingParams; only what is special to HTTP is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from quire.foundation.errors import InputError
from quire.server.http.body import Body
from quire.server.http.field_limits import MIB
from quire.types.sampling import MAX_N

INT64 = 2**63
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
# What a beam search does not look at, and would change its answers.
NOT_WITH_BEAMS = (
    "stop",
    "stop_token_ids",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "prompt_embeds",
    "logprob_token_ids",
    "repetition_detection",
    "vllm_xargs",
)


class LabelledBody(Body):
    """What every request that generates says of itself."""

    family: ClassVar[str] = "generation"

    model: str | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    priority: int = Field(0, ge=-INT64, lt=INT64)
    cache_salt: str | None = Field(None, min_length=1)
    request_id: str | None = Field(None, min_length=1, max_length=256)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.get("continuous_usage_stats"))

    @property
    def asked_tokens(self) -> tuple[str, int] | None:
        """The field that limits the answer, and what the client says there; None: as many as the context leaves."""
        return None


class GenerationBody(LabelledBody):
    """What completions and chat share."""

    unsupported: ClassVar[tuple[str, ...]] = ("kv_transfer_params", "ec_transfer_params", "logits_processors")

    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, le=INT64 - 1)
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: dict[str, int] | None = None
    vllm_xargs: dict[str, Any] | None = None  # SamplingParams.extra_args
    logits_processors: Any = None  # SamplingParams says where they belong
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None  # the guided_ fields: of older clients
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    user: str | None = None

    @property
    def asked_tokens(self) -> tuple[str, int] | None:
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options needs stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InputError("prompt_logprobs cannot be streamed; use stream=false", "prompt_logprobs")
        if self.use_beam_search:
            self._check_beams()
        return self

    def _check_beams(self) -> None:
        if self.stream:
            raise InputError("use_beam_search cannot be streamed; use stream=false", "use_beam_search")
        fields = type(self).model_fields
        for name in NOT_WITH_BEAMS:
            usual = fields[name].get_default(call_default_factory=True) if name in fields else None
            if name in fields and getattr(self, name) not in (None, usual):
                raise InputError(f"{name} cannot be given with use_beam_search", name)


class CompletionBody(GenerationBody):
    instead: ClassVar[Mapping[str, str]] = {
        "input": "prompt",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "stop_sequences": "stop",
        "token_ids": "prompt",
        "top_logprobs": "logprobs",
    }

    prompt: Any = None  # checked in `prompts`: a union here would report one error a branch
    prompt_embeds: str | list[str] | None = None  # base64, one each
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = None
    suffix: str | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)

    @model_validator(mode="after")
    def _check_embeds(self) -> CompletionBody:
        if self.prompt_embeds is not None:
            for name, plain in (("prompt", None), ("echo", False), ("truncate_prompt_tokens", None)):
                if getattr(self, name) != plain:
                    raise InputError(f"{name} cannot be given beside prompt_embeds", name)
        return self

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if self.suffix:
            raise InputError("suffix is not supported: models here do not fill in the middle", "suffix")
        if self.thinking_token_budget not in (None, -1):
            raise InputError(
                "thinking_token_budget needs a conversation: plain completions do not tell reasoning apart",
                "thinking_token_budget",
            )
        if self.best_of is not None and self.best_of != self.n:
            raise InputError(f"best_of must equal n ({self.n}), got {self.best_of}: answers are not ranked", "best_of")
        if self.use_beam_search and self.echo and (self.logprobs is not None or self.max_tokens == 0):
            raise InputError("use_beam_search does not score the prompt: echo goes without logprobs", "echo")
        if self.max_tokens == 0 and not self.echo:
            raise InputError("max_tokens must be >= 1 (0 is allowed with echo), got 0", "max_tokens")
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise InputError("logprob_token_ids needs logprobs", "logprob_token_ids")
        if self.logprob_token_ids is not None and self.echo and self.max_tokens == 0:
            raise InputError(
                "logprob_token_ids are of the answer, and echo with max_tokens=0 has none", "logprob_token_ids"
            )
        return self


class ChatFields(GenerationBody):
    """All of a chat request but its messages."""

    unsupported: ClassVar[tuple[str, ...]] = (
        *GenerationBody.unsupported,
        "prompt_embeds",
        "functions",
        "function_call",
        "audio",
        "moderation",
        "web_search_options",
    )
    without_effect: ClassVar[tuple[str, ...]] = (
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    )
    max_bytes: ClassVar[Mapping[str, int]] = {"documents": 2 * MIB}
    instead: ClassVar[Mapping[str, str]] = {
        "input": "messages",
        "instructions": "a system message",
        "max_output_tokens": "max_completion_tokens",
        "output_config": "response_format and reasoning_effort",
        "output_format": "response_format",
        "prompt": "messages",
        "reasoning": "reasoning_effort",
        "stop_sequences": "stop",
        "system": "a system message",
        "text": "response_format and verbosity",
        "thinking": "reasoning_effort or chat_template_kwargs",
    }

    max_completion_tokens: int | None = Field(None, le=INT64 - 1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=-1)
    tools: list[dict[str, Any]] | None = Field(None, min_length=1)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    modalities: list[Literal["text"]] | None = None  # what answers are made of
    verbosity: Verbosity | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)
    max_thinking_tokens: int | None = Field(None, ge=-1)
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    echo: bool = False
    return_prompt_text: bool = False

    @property
    def asked_tokens(self) -> tuple[str, int] | None:
        asked = self.max_completion_tokens
        return super().asked_tokens if asked is None else ("max_completion_tokens", asked)

    @model_validator(mode="after")
    def _check_chat(self) -> ChatFields:
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs=true", "top_logprobs")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise InputError("logprob_token_ids needs logprobs=true", "logprob_token_ids")
        if self.continue_final_message and self.add_generation_prompt:
            raise InputError(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        return self


class ChatBody(ChatFields):
    messages: list[dict[str, Any]] = Field(min_length=1)


class ChatBatchBody(ChatFields):
    messages: list[Annotated[list[dict[str, Any]], Field(min_length=1)]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_batch(self) -> ChatBatchBody:
        for name, plain in (("n", 1), ("stream", False), ("tools", None), ("echo", False), ("use_beam_search", False)):
            if getattr(self, name) != plain:
                raise InputError(f"{name} cannot be given in a batch of conversations", name)
        if self.tool_choice not in (None, "none"):
            raise InputError("tool_choice must be 'none' in a batch of conversations", "tool_choice")
        return self


class TokenizeBody(Body):
    unsupported: ClassVar[tuple[str, ...]] = ("truncate_prompt_tokens", "mm_processor_kwargs")
    max_bytes: ClassVar[Mapping[str, int]] = {"documents": 2 * MIB}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InputError("give either prompt or messages", "prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise InputError(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]
