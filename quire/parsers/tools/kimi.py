"""Kimi K2: the head is the call's id, functions.NAME:INDEX, which is handed on as it is."""

from __future__ import annotations

from dataclasses import dataclass

from quire.parsers.layouts.headed_json import HeadedJson
from quire.parsers.layouts.structural import Part, regex


@dataclass(frozen=True, kw_only=True)
class _KimiK2(HeadedJson):
    def name_and_id(self, head: str) -> tuple[str, str | None]:
        call_id = head.strip()
        name, _, index = call_id.removeprefix("functions.").rpartition(":")
        return (name, call_id) if name and index.isdecimal() else (call_id.removeprefix("functions."), None)

    def head_grammar(self, name: str) -> tuple[str, list[Part]]:
        return f"functions.{name}:", [regex("[0-9]{1,4}")]


KIMI_K2 = _KimiK2(
    openings=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    closings=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call_begin="<|tool_call_begin|>",
    arguments_begin="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)
