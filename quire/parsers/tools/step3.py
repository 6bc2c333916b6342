"""Step-3: steptml tags inside markers of a section and of each call."""

from __future__ import annotations

from quire.parsers.layouts.tagged import TaggedCalls

_SECTION, _SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"

STEP3 = TaggedCalls(
    openings=(_SECTION,),
    closings=(_SECTION_END,),
    noise=(_CALL, _CALL_END),
    call="<steptml:invoke",
    call_end="</steptml:invoke>",
    argument="<steptml:parameter",
    argument_end="</steptml:parameter>",
    section_begin=_SECTION,
    section_end=_SECTION_END,
    call_prefix=_CALL,
    call_suffix=_CALL_END,
)
