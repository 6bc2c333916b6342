"""The contract of parsers: text goes in as it comes, in any portions; pieces come out as soon as they are certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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
    """How a family of models writes its tool calls. One object serves all requests; TOOL_FORMATS holds it by its names.

    A call is begun (CallStart) when its name and the beginning of its arguments are there; what breaks before that is
    content. If arguments break later, what came of them stays, without a CallEnd.
    """

    @property
    def needs_special_tokens(self) -> bool:
        """Its markers are special tokens, which the text must keep."""
        ...

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> Parser:
        """Reads one answer.

        Args:
            tools: of the request.
            parallel: False drops all calls but the first.
        """
        ...

    def constraint(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec | None:
        """What holds a model to this format and to the schemas of `tools`.

        Args:
            tools: of the request.
            required: at least one call and nothing else; else text, in which calls must be right.
            parallel: more than one call may come.

        Returns:
            None if the format has no grammar.
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
    def end_before_calls(self) -> str:
        """What ends it if a call follows, not content; mostly the same."""
        ...

    @property
    def wraps_content(self) -> bool:
        """The content has marks of its own: the parser is needed even if there is no reasoning."""
        ...

    def parser(
        self, prompt: str, template_kwargs: Mapping[str, Any], *, bound: bool = False, raw_calls: bool = False
    ) -> Parser:
        """Reads one answer. Its pieces are Reasoning and Content.

        Args:
            prompt: the rendered text, whose end may lie inside the reasoning.
            template_kwargs: that it was rendered with.
            bound: a grammar binds what follows the reasoning, so that nothing of it may be trimmed.
            raw_calls: a parser of calls reads the content, and needs them as they are written.
        """
        ...

    def opening(self, prompt: str, template_kwargs: Mapping[str, Any]) -> str:
        """ "open": the answer begins inside the reasoning; "maybe": it may begin with `start`; "off": it does not."""
        ...


_TOOLS = "quire.parsers.tools."
TOOL_FORMATS = Registry(
    "tool parser",
    {
        "apertus": _TOOLS + "json_lists:APERTUS",
        "cohere_command3": _TOOLS + "json_lists:COHERE_COMMAND3",
        "cohere_command4": _TOOLS + "json_lists:COHERE_COMMAND4",
        "deepseek_v3": _TOOLS + "deepseek:DEEPSEEK_V3",
        "deepseek_v31": _TOOLS + "deepseek:DEEPSEEK_V31",
        "deepseek_v32": _TOOLS + "dsml:DEEPSEEK_V32",
        "deepseek_v4": _TOOLS + "dsml:DEEPSEEK_V4",
        "ernie45": _TOOLS + "hermes:ERNIE45",
        "functiongemma": _TOOLS + "gemma:FUNCTIONGEMMA",
        "gemma4": _TOOLS + "gemma:GEMMA4",
        "gigachat3": _TOOLS + "json_objects:GIGACHAT3",
        "glm45": _TOOLS + "glm:GLM45",
        "glm47": _TOOLS + "glm:GLM47",
        "granite": _TOOLS + "json_lists:GRANITE",
        "granite-20b-fc": _TOOLS + "json_objects:GRANITE_20B",
        "granite4": _TOOLS + "hermes:GRANITE4",
        "hermes": _TOOLS + "hermes:HERMES",
        "hunyuan_a13b": _TOOLS + "json_lists:HUNYUAN_A13B",
        "hy_v3": _TOOLS + "glm:HY_V3",
        "inkling": _TOOLS + "json_objects:INKLING",
        "internlm": _TOOLS + "json_objects:INTERNLM",
        "jamba": _TOOLS + "json_lists:JAMBA",
        "kimi_k2": _TOOLS + "kimi:KIMI_K2",
        "lfm2": _TOOLS + "pythonic:LFM2",
        "llama3_json": _TOOLS + "json_objects:LLAMA3_JSON",
        "llama4_json": _TOOLS + "json_objects:LLAMA3_JSON",
        "llama4_pythonic": _TOOLS + "pythonic:LLAMA4_PYTHONIC",
        "longcat": _TOOLS + "hermes:LONGCAT",
        "minicpm5": _TOOLS + "minicpm5:MINICPM5",
        "minimax_m2": _TOOLS + "minimax_m2:MINIMAX_M2",
        "minimax_m3": _TOOLS + "minimax_m3:MINIMAX_M3",
        "mistral": _TOOLS + "mistral:MISTRAL",
        "olmo3": _TOOLS + "pythonic:OLMO3",
        "openai": _TOOLS + "harmony:HARMONY",
        "phi4_mini_json": _TOOLS + "json_lists:PHI4_MINI",
        "poolside_v1": _TOOLS + "glm:GLM45",
        "pythonic": _TOOLS + "pythonic:PYTHONIC",
        "qwen3_coder": _TOOLS + "qwen3_coder:QWEN3_CODER",
        "qwen3_xml": _TOOLS + "qwen3_coder:QWEN3_CODER",
        "mimo": _TOOLS + "qwen3_coder:QWEN3_CODER",
        "seed_oss": _TOOLS + "qwen3_coder:SEED_OSS",
        "step3": _TOOLS + "step3:STEP3",
        "step3p5": _TOOLS + "qwen3_coder:QWEN3_CODER",
        "xlam": _TOOLS + "json_objects:XLAM",
    },
    contract="quire.parsers.base:ToolFormat",
    needs=("needs_special_tokens", "parser", "constraint"),
)
_FAMILIES = "quire.parsers.reasoning.families:"
REASONING_FORMATS = Registry(
    "reasoning parser",
    {
        "cohere_command3": _FAMILIES + "COHERE_COMMAND3",
        "cohere_command4": _FAMILIES + "COHERE_COMMAND4",
        "deepseek_r1": _FAMILIES + "DEEPSEEK_R1",
        "deepseek_v3": _FAMILIES + "DEEPSEEK_V3",
        "deepseek_v4": _FAMILIES + "DEEPSEEK_V4",
        "ernie45": _FAMILIES + "ERNIE45",
        "gemma4": _FAMILIES + "GEMMA4",
        "glm45": _FAMILIES + "GLM",
        "glm47": _FAMILIES + "GLM",
        "granite": _FAMILIES + "GRANITE",
        "holo2": _FAMILIES + "HOLO2",
        "hunyuan_a13b": _FAMILIES + "HUNYUAN_A13B",
        "hy_v3": _FAMILIES + "HY_V3",
        "inkling": "quire.parsers.reasoning.channels:INKLING",
        "kimi_k2": _FAMILIES + "KIMI_K2",
        "mimo": _FAMILIES + "QWEN3",
        "minimax_m2": _FAMILIES + "MINIMAX_M2",
        "minimax_m2_append_think": _FAMILIES + "MINIMAX_M2_APPEND_THINK",
        "minimax_m3": _FAMILIES + "MINIMAX_M3",
        "mistral": _FAMILIES + "MISTRAL",
        "nemotron_v3": _FAMILIES + "NEMOTRON_V3",
        "olmo3": _FAMILIES + "OLMO3",
        "openai_gptoss": "quire.parsers.reasoning.channels:HARMONY",
        "poolside_v1": _FAMILIES + "POOLSIDE",
        "qwen3": _FAMILIES + "QWEN3",
        "seed_oss": _FAMILIES + "SEED_OSS",
        "step3": _FAMILIES + "STEP3",
        "step3p5": _FAMILIES + "STEP3P5",
    },
    contract="quire.parsers.base:ReasoningFormat",
    needs=("start", "end", "end_before_calls", "wraps_content", "parser", "opening"),
)
