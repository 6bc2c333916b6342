"""Conversations: how the model writes what is not plain content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ReplyConfig:
    tool_call_parser: str = "auto"
    """Format of the model's tool calls by name; auto: found in its chat template; none: answers hold no calls."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning by name; auto: found in its chat template; none: all is content."""
    tool_parser_plugin: str | None = None
    """Python file that registers further tool formats (`TOOL_FORMATS.register`)."""
    reasoning_parser_plugin: str | None = None
    """Python file that registers further reasoning formats (`REASONING_FORMATS.register`)."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON object of chat template variables; those of a request come first."""
