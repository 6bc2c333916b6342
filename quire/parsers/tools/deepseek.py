"""DeepSeek V3 and R1 (the arguments in a code block) and V3.1 (bare)."""

from __future__ import annotations

from quire.parsers.layouts.headed_json import HeadedJson

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"

DEEPSEEK_V3 = HeadedJson(
    openings=(_SECTION, f"{_CALL}function{_SEP}"),
    closings=(_SECTION_END,),
    call_begin=f"{_CALL}function{_SEP}",
    arguments_begin="\n```json\n",
    call_end=_CALL_END,
    fence="```",
    joint="\n",
)

DEEPSEEK_V31 = HeadedJson(
    openings=(_SECTION, _CALL),
    closings=(_SECTION_END,),
    call_begin=_CALL,
    arguments_begin=_SEP,
    call_end=_CALL_END,
)
