"""MiniCPM5: <function> tags without a section."""

from __future__ import annotations

from quire.parsers.layouts.tagged import TaggedCalls

MINICPM5 = TaggedCalls(
    openings=("<function",),
    call="<function",
    call_end="</function>",
    argument="<param",
    argument_end="</param>",
    joint="\n",
)
