"""What binds the tokens of an answer: a grammar, and where the thinking before it ends."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"]
GrammarBackend = Literal["auto", "xgrammar", "llguidance"]


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a user asks for, under the field's usual names: exactly one of the first six."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF
    structural_tag: str | dict[str, Any] | None = None
    backend: GrammarBackend = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    close_at_limit: bool = False  # near max_tokens only what closes the value soonest is allowed


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One grammar, checked and in canonical form: equal grammars are equal specs, and compiled once."""

    kind: GrammarKind
    text: str  # JSON text of a schema, a list of choices or a structural tag; else the regex or EBNF itself
    backend: GrammarBackend = "auto"
    whitespace: Literal["bounded", "none"] | str = "bounded"  # between JSON tokens; else a regex


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the reasoning of an answer begins and ends, in token ids. A grammar binds what follows it."""

    end: list[int]
    start: list[int] = msgspec.field(default_factory=list)
    # "open": the answer begins inside the reasoning. "maybe": it begins with `start` or with the answer itself.
    state: Literal["open", "maybe"] = "open"
    max_tokens: int | None = None  # then `end` is forced; None: as long as the model likes


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that may be forbidden to one answer, step by step."""

    grammar: GrammarSpec | None = None
    thinking: Thinking | None = None
    close_at_limit: bool = False
