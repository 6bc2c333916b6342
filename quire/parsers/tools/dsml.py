"""DeepSeek V3.2 and V4: DSML tags, whose attribute tells strings from JSON."""

from __future__ import annotations

from quire.parsers.layouts.tagged import TaggedCalls


def _family(section: str) -> TaggedCalls:
    return TaggedCalls(
        openings=(f"<｜DSML｜{section}>",),
        closings=(f"</｜DSML｜{section}>",),
        call="<｜DSML｜invoke",
        call_end="</｜DSML｜invoke>",
        argument="<｜DSML｜parameter",
        argument_end="</｜DSML｜parameter>",
        has_types=True,
        section_begin=f"<｜DSML｜{section}>\n",
        section_end=f"\n</｜DSML｜{section}>",
        line="\n",
        joint="\n",
    )


DEEPSEEK_V32 = _family("function_calls")
DEEPSEEK_V4 = _family("tool_calls")
