"""Qwen3-Coder, Qwen3.5, MiMo, Nemotron 3, Step-3.5 and, with a marker of its own, Seed-OSS."""

from __future__ import annotations

from quire.parsers.layouts.tagged import TaggedCalls


def _family(opening: str, closing: str, padding: str) -> TaggedCalls:
    # The models leave the outer tag out at times.
    return TaggedCalls(
        openings=(opening, "<function="),
        closings=(closing,),
        call="<function=",
        call_end="</function>",
        argument="<parameter=",
        argument_end="</parameter>",
        padding=padding,
        call_prefix=f"{opening}\n",
        call_suffix=f"\n{closing}",
        line="\n",
        joint="\n",
    )


QWEN3_CODER = _family("<tool_call>", "</tool_call>", padding="\n")
SEED_OSS = _family("<seed:tool_call>", "</seed:tool_call>", padding="")
