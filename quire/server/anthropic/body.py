"""The fields of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from quire.foundation.errors import InputError
from quire.server.http.body import Body
from quire.types.json_text import JsonText

# What the client calls the fields of the chat request that it becomes.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "stop": "stop_sequences",
    "structured_outputs": "output_config",
    "thinking_token_budget": "thinking",
    "max_thinking_tokens": "thinking",
}
WITHOUT_EFFECT = (
    "betas",
    "billing_policy",
    "cache_control",
    "context_management",
    "speed",
    "user_profile_id",
    "workspace_id",
)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ThinkingOptions(Body):
    within: ClassVar[str] = "thinking"
    without_effect: ClassVar[tuple[str, ...]] = ("block_binding",)  # thoughts are bound to nothing

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] = "summarized"


class OutputOptions(Body):
    within: ClassVar[str] = "output_config"
    unsupported: ClassVar[tuple[str, ...]] = ("task_budget",)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class ToolChoiceOptions(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountTokensBody(Body):
    """What decides on the prompt."""

    family: ClassVar[str] = "generation"
    instead: ClassVar[Mapping[str, str]] = {
        "documents": "chat_template_kwargs",
        "input": "messages",
        "instructions": "system",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "parallel_tool_calls": "tool_choice",
        "prompt": "messages",
        "reasoning": "output_config.effort",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "structured_outputs": "output_config.format",
        "text": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    unsupported: ClassVar[tuple[str, ...]] = ("container", "mcp_servers", "kv_transfer_params", "ec_transfer_params")
    without_effect: ClassVar[tuple[str, ...]] = (*WITHOUT_EFFECT, "compaction")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: ToolChoiceOptions = Field(default_factory=ToolChoiceOptions)
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions = Field(default_factory=OutputOptions)
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_choice(self) -> CountTokensBody:
        if self.tool_choice.type == "tool" and not self.tool_choice.name:
            raise InputError("tool_choice of type 'tool' needs the name of a tool", "tool_choice")
        return self

    def chat_fields(self, messages: Sequence[dict[str, Any]], functions: list[dict[str, Any]]) -> dict[str, Any]:
        """The chat request that this means. An answer goes on with a last message of the assistant, unless it calls."""
        goes_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        return {
            "messages": list(messages),
            "continue_final_message": goes_on,
            "tools": functions or None,
            "tool_choice": self._chat_choice(functions),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
            "response_format": self._response_format(),
            "chat_template_kwargs": self._template_kwargs(),
        }

    def _chat_choice(self, functions: list[dict[str, Any]]) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if not functions and choice.type in ("auto", "none"):
            return None
        if choice.type == "tool":
            return {"type": "function", "function": {"name": choice.name}}
        return CHOICES[choice.type]

    def _template_kwargs(self) -> dict[str, Any]:
        if self.thinking is None:
            return self.chat_template_kwargs
        is_on = self.thinking.type != "disabled"
        return {
            "enable_thinking": is_on,
            "thinking": is_on,
        } | self.chat_template_kwargs  # templates know one or the other

    def _response_format(self) -> dict[str, Any] | None:
        form = self.output_config.format or self.output_format
        if form is None:
            return None
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict | JsonText):
            raise InputError("output_config.format must be of type 'json_schema' with a schema", "output_config")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], "strict": True}}


class MessagesBody(CountTokensBody):
    unsupported: ClassVar[tuple[str, ...]] = (
        *CountTokensBody.unsupported,
        "compaction",
        "fallback_credit_token",
        "inference_geo",
    )
    without_effect: ClassVar[tuple[str, ...]] = (*WITHOUT_EFFECT, "diagnostics", "fallbacks")

    thread: dict[str, Any] | None = None  # see `anthropic.refuse_thread`
    max_tokens: int = Field(ge=1, lt=2**63)
    metadata: dict[str, Any] = Field(default_factory=dict)
    service_tier: Literal["auto", "standard_only"] = "auto"
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def chat_fields(self, messages: Sequence[dict[str, Any]], functions: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **super().chat_fields(messages, functions),
            "max_completion_tokens": self.max_tokens,
            "seed": self.seed,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"
