"""An answer that is content under a grammar, or calls in the model's own format."""

from __future__ import annotations

import json
from typing import Any

from quire.parsers.layouts.structural import CALLS_BACKEND, MAX_WHITESPACE, Part, either, literal
from quire.types.structured import GrammarSpec


def content_or_calls(content: GrammarSpec, calls: GrammarSpec | None) -> GrammarSpec:
    """`content` alone if there is no grammar that holds both."""
    if calls is None or calls.kind != "structural_tag":
        return content
    try:
        part = _part_of(content)
    except (ValueError, RecursionError):
        return content  # a long schema that is no JSON is refused where it is compiled
    if part is None:
        return content
    tag = either([part, _format(json.loads(calls.text))])
    return GrammarSpec("structural_tag", json.dumps(tag, ensure_ascii=False, separators=(",", ":")), CALLS_BACKEND)


def _part_of(spec: GrammarSpec) -> Part | None:
    if spec.kind in ("json_schema", "json_object"):
        if spec.whitespace not in ("bounded", "none"):
            return None  # a pattern of the user's: parts know only limits
        schema: Any = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
        limit = 0 if spec.whitespace == "none" else MAX_WHITESPACE
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": limit}
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.text}
    if spec.kind == "ebnf":
        return {"type": "grammar", "grammar": spec.text}
    if spec.kind == "choice":
        return either([literal(choice) for choice in json.loads(spec.text)])
    return _format(json.loads(spec.text))


def _format(tag: Part) -> Part:
    found: Part = tag["format"] if tag["type"] == "structural_tag" else tag
    return found
