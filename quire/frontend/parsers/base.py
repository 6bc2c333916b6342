"""The contract of parsers: text goes in as it comes, in any portions; pieces come out as soon as they are certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from quire.foundation.registry import Registry
from quire.types.reply import Piece, Tool
from quire.types.structured import GrammarSpec


class Parser(Protocol):
    """Of one answer, once. However the text is cut, the pieces are the same when those alike are joined."""

    def feed(self, text: str) -> list[Piece]:
        """What `text` made certain; an undecided end (half a marker) is kept back."""
        ...

    def finish(self) -> list[Piece]:
        """The answer has ended: what was kept back. Markup that never became a call is content."""
        ...


class ToolFormat(Protocol):
    """How a family of models writes its tool calls; registered in TOOL_FORMATS under its names."""

    needs_special_tokens: ClassVar[bool]  # its markers are special tokens, which the text must keep

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> Parser:
        """tools: of the request; parallel: False drops all calls but the first."""
        ...

    def constraint(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec | None:
        """What holds a model to this format and to the schemas of `tools`.

        required: at least one call and nothing else; else text, in which calls must be right. None: the format has no
        grammar.
        """
        ...


class ReasoningFormat(Protocol):
    """How a family of models marks its reasoning. One object serves all requests."""

    @property
    def start(self) -> str:
        """The marker that it begins with, in the answer or at the end of the prompt."""
        ...

    @property
    def end(self) -> str: ...

    @property
    def wraps_content(self) -> bool:
        """The content has marks of its own: the parser is needed even if there is no reasoning."""
        ...

    def parser(self, prompt: str, template_kwargs: Mapping[str, Any], *, bound: bool = False) -> Parser:
        """prompt: the rendered text, whose end may lie inside the reasoning. Its pieces are Reasoning and Content.

        bound: a grammar binds what follows the reasoning, so that nothing of it may be trimmed.
        """
        ...

    def opening(self, prompt: str, template_kwargs: Mapping[str, Any]) -> str:
        """ "open": the answer begins inside the reasoning; "maybe": it may begin with `start`; "off": it does not."""
        ...


TOOL_FORMATS: Registry = Registry("tool parser", {})

_FAMILIES = "quire.frontend.parsers.reasoning.families"
REASONING_FORMATS: Registry = Registry(
    "reasoning parser",
    {
        "cohere_command3": f"{_FAMILIES}:COHERE_COMMAND3",
        "cohere_command4": f"{_FAMILIES}:COHERE_COMMAND4",
        "deepseek_r1": f"{_FAMILIES}:DEEPSEEK_R1",
        "deepseek_v3": f"{_FAMILIES}:DEEPSEEK_V3",
        "deepseek_v4": f"{_FAMILIES}:DEEPSEEK_V4",
        "ernie45": f"{_FAMILIES}:ERNIE45",
        "gemma4": f"{_FAMILIES}:GEMMA4",
        "glm45": f"{_FAMILIES}:GLM",
        "glm47": f"{_FAMILIES}:GLM",
        "granite": f"{_FAMILIES}:GRANITE",
        "holo2": f"{_FAMILIES}:HOLO2",
        "hunyuan_a13b": f"{_FAMILIES}:HUNYUAN_A13B",
        "hy_v3": f"{_FAMILIES}:HY_V3",
        "inkling": "quire.frontend.parsers.reasoning.channels:INKLING",
        "kimi_k2": f"{_FAMILIES}:KIMI_K2",
        "mimo": f"{_FAMILIES}:QWEN3",
        "minimax_m2": f"{_FAMILIES}:MINIMAX_M2",
        "minimax_m2_append_think": f"{_FAMILIES}:MINIMAX_M2_APPEND_THINK",
        "minimax_m3": f"{_FAMILIES}:MINIMAX_M3",
        "mistral": f"{_FAMILIES}:MISTRAL",
        "nemotron_v3": f"{_FAMILIES}:NEMOTRON_V3",
        "olmo3": f"{_FAMILIES}:OLMO3",
        "openai_gptoss": "quire.frontend.parsers.reasoning.channels:HARMONY",
        "poolside_v1": f"{_FAMILIES}:POOLSIDE",
        "qwen3": f"{_FAMILIES}:QWEN3",
        "seed_oss": f"{_FAMILIES}:SEED_OSS",
        "step3": f"{_FAMILIES}:STEP3",
        "step3p5": f"{_FAMILIES}:STEP3P5",
    },
)
