"""Conversations: how the model writes what is not plain content."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from quire.config.options import Options
from quire.foundation.errors import ConfigError
from quire.types.structured import BACKEND_PACKAGES, GRAMMAR_BACKENDS

_ALIASES = {"auto": "llguidance", "guidance": "llguidance"}  # of grammar backends


@dataclass(frozen=True, kw_only=True)
class ReplyConfig(Options):
    tool_call_parser: str = "auto"
    """Format of the model's tool calls by name; auto: found in its chat template; none: answers hold no calls."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning by name; auto: found in its chat template; none: all is content."""
    tool_parser_plugin: str | None = None
    """Python file that registers further tool formats (`TOOL_FORMATS.register`)."""
    reasoning_parser_plugin: str | None = None
    """Python file that registers further reasoning formats (`REASONING_FORMATS.register`)."""
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """JSON object; backend: what enforces structured outputs unless a request says, auto, llguidance, xgrammar, or
    what an installed package adds."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON object of chat template variables; those of a request come first."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        super().__post_init__()
        for key in self.structured_outputs_config:
            if key != "backend":
                raise ConfigError(
                    f"structured_outputs_config has the unknown key {key!r}; it may hold backend",
                    "structured_outputs_config",
                )
        if self.grammar_backend not in GRAMMAR_BACKENDS:
            known, got = ", ".join((*_ALIASES, *GRAMMAR_BACKENDS)), self.structured_outputs_config["backend"]
            raise ConfigError(
                f"structured_outputs_config: backend must be one of {known}; got {got!r}", "structured_outputs_config"
            )
        name = self.grammar_backend
        if self.structured_outputs_config and name in BACKEND_PACKAGES and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"structured_outputs_config: backend {name} is not installed: pip install '{BACKEND_PACKAGES[name]}'",
                "structured_outputs_config",
                code="missing-package",
            )

    @property
    def grammar_backend(self) -> str:
        """What enforces grammars that name no backend."""
        wanted: str = self.structured_outputs_config.get("backend", "auto")
        return _ALIASES.get(wanted, wanted)
