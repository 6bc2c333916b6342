"""Families that call as in Python: Llama 3.2 and 4, ToolACE, LFM2, OLMo 3."""

from __future__ import annotations

from quire.parsers.layouts.pythonic import PythonicCalls

PYTHONIC = PythonicCalls(openings=("[",), needs_special_tokens=False, begin="[", end="]")

LLAMA4_PYTHONIC = PythonicCalls(
    openings=("<|python_start|>", "["),
    closings=("<|python_end|>",),
    begin="<|python_start|>[",
    end="]<|python_end|>",
)

LFM2 = PythonicCalls(
    openings=("<|tool_call_start|>",),
    closings=("<|tool_call_end|>",),
    begin="<|tool_call_start|>[",
    end="]<|tool_call_end|>",
)

OLMO3 = PythonicCalls(
    openings=("<function_calls>",),
    closings=("</function_calls>",),
    needs_special_tokens=False,
    begin="<function_calls>\n",
    end="\n</function_calls>",
    joint="\n",
)
