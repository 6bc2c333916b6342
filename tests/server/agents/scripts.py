"""What a model may say, and what that is in pieces."""

from __future__ import annotations

import json
from typing import Any

THOUGHT = "<think>\nLet me see: 2 + 2.\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


LOOK = call("look", query='"quotes", {braces} & ünï 🦊 </tool', limit=3)
SUM = call("add", a=1, b=[2, {"c": None}])

SCRIPTS = {
    "text": "Hello, who are you?",
    "unicode": "Grüße 🦊 — “quoted”\n\n  indented\n",
    "empty": "",
    "thought": THOUGHT + "It is 4.",
    "thought_alone": THOUGHT,
    "call": LOOK,
    "text_call": "I will look it up.\n" + LOOK,
    "thought_call": THOUGHT + LOOK,
    "thought_text_calls": f"{THOUGHT}Two things at once.\n{LOOK}\n{SUM}",
    "no_arguments": call("look"),
}
FUNCTIONS = {
    "look": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "additionalProperties": False,
    },
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
}
