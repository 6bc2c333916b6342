"""MiniMax-M2: a section of <invoke> tags."""

from __future__ import annotations

from quire.parsers.layouts.tagged import TaggedCalls

MINIMAX_M2 = TaggedCalls(
    openings=("<minimax:tool_call>",),
    closings=("</minimax:tool_call>",),
    call="<invoke",
    call_end="</invoke>",
    argument="<parameter",
    argument_end="</parameter>",
    section_begin="<minimax:tool_call>\n",
    section_end="\n</minimax:tool_call>",
    line="\n",
    joint="\n",
)
