"""How each family of models marks its reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.parsers.base import Parser
from quire.parsers.reasoning.marked import MarkedReasoning, SuffixedReasoning
from quire.parsers.reasoning.splitter import ReasoningMarkers
from quire.types.reply import Content, Piece

_START, _END = "<think>", "</think>"
_THINK = ReasoningMarkers((_START,), (_END,))

# Without a word in the prompt, text before the end marker is reasoning even if nothing begins it.
DEEPSEEK_R1 = HOLO2 = STEP3 = MINIMAX_M2 = MarkedReasoning(_THINK, silent="open")
DEEPSEEK_V3 = MarkedReasoning(_THINK, silent="open", thinks=False)
DEEPSEEK_V4 = MarkedReasoning(
    ReasoningMarkers((_START,), (_END,), call_starts=("<｜DSML｜tool_calls>",)), silent="open", thinks=False
)
QWEN3 = GLM = NEMOTRON_V3 = OLMO3 = STEP3P5 = MarkedReasoning(_THINK)
POOLSIDE = MarkedReasoning(_THINK, thinks=False)
KIMI_K2 = MarkedReasoning(
    ReasoningMarkers((_START,), (_END,), call_starts=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"))
)
MINIMAX_M3 = MarkedReasoning(ReasoningMarkers(("<mm:think>",), ("</mm:think>",)))
SEED_OSS = MarkedReasoning(ReasoningMarkers(("<seed:think>",), ("</seed:think>",)))
HY_V3 = SuffixedReasoning(_THINK)
ERNIE45 = MarkedReasoning(ReasoningMarkers((_START,), (_END,), tags=("<response>", "</response>")))
HUNYUAN_A13B = MarkedReasoning(ReasoningMarkers((_START,), (_END,), tags=("<answer>", "</answer>")))
GRANITE = MarkedReasoning(
    ReasoningMarkers(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        trimmed=" \n",
    )
)
MISTRAL = MarkedReasoning(ReasoningMarkers(("[THINK]",), ("[/THINK]",)))
GEMMA4 = MarkedReasoning(ReasoningMarkers(("<|channel>thought",), ("<channel|>",)))
COHERE_COMMAND3 = MarkedReasoning(
    ReasoningMarkers(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        call_starts=("<|START_ACTION|>",),
        tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    )
)
COHERE_COMMAND4 = MarkedReasoning(
    ReasoningMarkers(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        call_starts=("<|START_ACTION|>",),
        tags=("<|START_TEXT|>", "<|END_TEXT|>"),
    )
)


class ThinkPutBefore:
    """For clients that split by themselves: the start marker, which the prompt has, is put before the text."""

    start = _START
    end = end_before_calls = _END
    wraps_content = True

    def opening(self, prompt: str, template_kwargs: Mapping[str, Any]) -> str:
        del prompt, template_kwargs
        return "off"

    def parser(
        self, prompt: str, template_kwargs: Mapping[str, Any], *, bound: bool = False, raw_calls: bool = False
    ) -> Parser:
        del prompt, template_kwargs, bound, raw_calls
        return _Prefixed(_START)


class _Prefixed:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def feed(self, text: str) -> list[Piece]:
        prefix, self._prefix = self._prefix, ""
        return [Content(prefix + text)]

    def finish(self) -> list[Piece]:
        return []


MINIMAX_M2_APPEND_THINK = ThinkPutBefore()
