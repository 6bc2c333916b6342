"""Families that write a marker and a JSON list of calls."""

from __future__ import annotations

from quire.parsers.layouts.json_calls import JsonCalls

APERTUS = JsonCalls(
    openings=("<|tools_prefix|>",),
    closings=("<|tools_suffix|>",),
    keyed_by_name=True,
    is_list=True,
    end="<|tools_suffix|>",
)

_COHERE = ("<|START_ACTION|>", "<|END_ACTION|>")


def _cohere(word: str) -> JsonCalls:
    return JsonCalls(
        openings=(_COHERE[0],),
        closings=(_COHERE[1],),
        frames=(f"<|START_{word}|>", f"<|END_{word}|>"),
        name_keys=("tool_name",),
        argument_keys=("parameters",),
        id_key="tool_call_id",
        is_list=True,
        list_brackets=("[\n    ", "\n]"),
        joint=",\n    ",
        end=_COHERE[1],
    )


COHERE_COMMAND3 = _cohere("RESPONSE")
COHERE_COMMAND4 = _cohere("TEXT")

GRANITE = JsonCalls(
    openings=("<|tool_call|>", "<tool_call>"),
    closings=("</tool_call>", "<|/tool_call|>"),
    is_list=True,
)

JAMBA = JsonCalls(
    openings=("<tool_calls>",),
    closings=("</tool_calls>",),
    is_list=True,
    end="</tool_calls>",
)

HUNYUAN_A13B = JsonCalls(
    openings=("<tool_calls>",),
    closings=("</tool_calls>",),
    frames=("<answer>", "</answer>"),
    is_list=True,
    end="</tool_calls>",
)

PHI4_MINI = JsonCalls(openings=("functools",), is_list=True, needs_special_tokens=False)
