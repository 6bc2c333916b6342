"""Families that write a marker, or nothing at all, and JSON objects."""

from __future__ import annotations

from quire.parsers.layouts.json_calls import JsonCalls

GIGACHAT3 = JsonCalls(
    openings=("function call<|role_sep|>", "<|function_call|>"),
    frames=("<|message_sep|>",),
    begin="function call<|role_sep|>\n",
    joint="<|message_sep|>\n\n",
)

GRANITE_20B = JsonCalls(
    openings=("<function_call>",),
    needs_special_tokens=False,
    begin="<function_call> ",
    joint="\n",
)

INKLING = JsonCalls(
    openings=("<|content_invoke_tool_json|>",),
    closings=("<|end_message|>",),
    frames=("<|message_model|>", "<|content_text|>", "<|end_message|>"),
    argument_keys=("args", "arguments"),
    end="<|end_message|>",
    joint="<|message_model|>",
)

INTERNLM = JsonCalls(
    openings=("<|action_start|>",),
    closings=("<|action_end|>",),
    prefixes=("<|plugin|>",),
    argument_keys=("parameters", "arguments"),
    begin="<|action_start|><|plugin|>",
    end="<|action_end|>",
    joint="",
)

LLAMA3_JSON = JsonCalls(
    openings=("<|python_tag|>", "{"),
    needs_special_tokens=False,
    argument_keys=("parameters", "arguments"),
    is_bare=True,
    joint="; ",
)

# The list comes alone, in a code block or behind one of several markers.
XLAM = JsonCalls(
    openings=("[", "<tool_call>", "```json"),
    closings=("</tool_call>",),
    prefixes=("[TOOL_CALLS]",),
    tails=("```",),
    needs_special_tokens=False,
    is_list=True,
)
