"""The fields of POST /v1/responses, and the parts of the reply that repeat them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.server.http.body import Body
from quire.server.responses.input import CALLABLE, Tools

INCLUDABLE = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:")
# Fields that chat has under the same names.
SHARED = (
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "logit_bias",
    "min_p",
    "min_tokens",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "temperature",
    "thinking_token_budget",
    "top_k",
    "top_p",
    "user",
    "vllm_xargs",
)
# What the client calls the fields of the chat request that it becomes.
NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}


class ReasoningOptions(Body):
    within: ClassVar[str] = "reasoning"
    without_effect: ClassVar[tuple[str, ...]] = ("context",)  # the template decides which thoughts the model sees again

    mode: Literal["standard"] | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Body):
    within: ClassVar[str] = "text"

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    verbosity: Literal["low", "medium", "high"] | None = None


class CountBody(Body):
    """What decides on the prompt."""

    family: ClassVar[str] = "generation"
    also_read: ClassVar[tuple[str, ...]] = SHARED
    instead: ClassVar[Mapping[str, str]] = {
        "documents": "chat_template_kwargs",
        "logprobs": "include",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "max_thinking_tokens": "thinking_token_budget",
        "messages": "input",
        "output_config": "text and reasoning",
        "output_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "stop_sequences": "stop",
        "system": "instructions",
        "thinking": "reasoning or chat_template_kwargs",
        "verbosity": "text.verbosity",
    }
    unsupported: ClassVar[tuple[str, ...]] = ("prompt", "conversation", "personality")
    without_effect: ClassVar[tuple[str, ...]] = (
        "image",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
    )

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    text: TextOptions = Field(default_factory=TextOptions)
    truncation: Literal["auto", "disabled"] = "disabled"
    shared: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)  # the fields of SHARED that were given

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {**data, "shared": {name: data[name] for name in SHARED if data.get(name) is not None}}

    @model_validator(mode="after")
    def _check_input(self) -> CountBody:
        if not self.input and self.previous_response_id is None:
            raise InputError("input must be a string or a list of items, and not empty", "input")
        return self

    @property
    def names(self) -> dict[str, str]:
        """What the client calls the fields of the chat request."""
        return NAMES if "structured_outputs" in self.shared else {**NAMES, "structured_outputs": "text"}

    def chat_fields(self, messages: Sequence[dict[str, Any]], tools: Tools, tool_choice: Any) -> dict[str, Any]:
        """The chat request that this means."""
        return {
            **self.shared,
            "messages": list(messages),
            "tools": tools.functions or None,
            "tool_choice": None if tool_choice == "auto" else tool_choice,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "response_format": _response_format(self.text.format),
        }


class ResponsesBody(CountBody):
    unsupported: ClassVar[tuple[str, ...]] = (
        *CountBody.unsupported,
        "context_management",
        "ec_transfer_params",
        "enable_response_messages",
        "moderation",
        "previous_input_messages",
    )
    without_effect: ClassVar[tuple[str, ...]] = (
        *CountBody.without_effect,
        "access_programs",
        "background_options",
        "stream_options",
    )

    background: bool = False
    include: list[str] = Field(default_factory=list)
    include_reasoning: bool = True
    max_output_tokens: int | None = Field(None, ge=1, lt=2**63)
    max_tool_calls: int | None = Field(None, ge=1)
    metadata: dict[str, str] = Field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_cache_key: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=256)
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] = "auto"
    store: bool = True
    stream: bool = False
    temperature: float | None = None
    top_logprobs: int = Field(0, ge=0, le=20)
    top_p: float | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesBody:
        if self.background and not self.store:
            raise InputError("background needs store=true: the response is fetched later", "background")
        unknown = [name for name in self.include if name not in INCLUDABLE]
        if unknown:
            raise InputError(f"include may hold {', '.join(INCLUDABLE)}, got {unknown[0][:80]!r}", "include")
        check_metadata(self.metadata)
        if self.request_id is not None and not ID_CHARACTERS.issuperset(self.request_id):
            raise InputError("request_id may hold letters, digits and _ - . : only", "request_id")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @property
    def seals_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in self.include

    def chat_fields(self, messages: Sequence[dict[str, Any]], tools: Tools, tool_choice: Any) -> dict[str, Any]:
        return {
            **super().chat_fields(messages, tools, tool_choice),
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream or self.background,  # what runs in the background can be read as it grows
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else 0,
        }

    def response(self, response_id: str, model: str, temperature: float, top_p: float) -> dict[str, Any]:
        """The reply before there is an answer. The sampling values are those in effect."""
        return {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if self.background else "in_progress",
            "background": self.background,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata,
            "model": model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "previous_response_id": self.previous_response_id,
            "prompt": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": self.reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default" if self.service_tier == "auto" else self.service_tier,
            "store": self.store,
            "temperature": temperature,
            "text": {"format": self.text.format, "verbosity": self.text.verbosity or "medium"},
            "tool_choice": self.tool_choice,
            "tools": [tool for tool in self.tools if tool.get("type") in CALLABLE],
            "top_logprobs": self.top_logprobs,
            "top_p": top_p,
            "truncation": self.truncation,
            "usage": None,
            "user": self.user,
        }


def _response_format(form: dict[str, Any]) -> dict[str, Any] | None:
    """text.format in chat's shape."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_schema":
        if not isinstance(form.get("schema"), dict):
            raise InputError("text.format of type 'json_schema' needs a schema (an object)", "text")
        picked = {key: form[key] for key in ("name", "description", "schema", "strict") if form.get(key) is not None}
        return {"type": "json_schema", "json_schema": picked}
    if kind == "json_object":
        return {"type": "json_object"}
    raise InputError(f"text.format.type must be text, json_object or json_schema, got {shown(kind)}", "text")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises InputError for more than OpenAI allows."""
    if len(metadata) > MAX_METADATA:
        raise InputError(f"metadata may hold at most {MAX_METADATA} pairs, got {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise InputError(
                f"metadata: keys have at most {MAX_KEY} characters and values {MAX_VALUE}, see {key[:MAX_KEY]!r}",
                "metadata",
            )
