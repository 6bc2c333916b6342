"""Hermes and the many models that write <tool_call>{…}</tool_call>: Qwen 2.5 and 3, LongCat, Granite 4, ERNIE 4.5."""

from __future__ import annotations

from quire.parsers.layouts.json_calls import JsonCalls


def _family(word: str, line: str = "\n", frames: tuple[str, ...] = ()) -> JsonCalls:
    return JsonCalls(
        openings=(f"<{word}>",),
        closings=(f"</{word}>",),
        frames=frames,
        begin=f"<{word}>{line}",
        end=f"{line}</{word}>",
        joint="\n",
    )


HERMES = _family("tool_call")
LONGCAT = _family("longcat_tool_call")
GRANITE4 = _family("tool_call", line="")
ERNIE45 = _family("tool_call", frames=("<response>", "</response>"))
