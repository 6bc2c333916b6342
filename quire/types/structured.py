"""What binds the tokens of an answer: a grammar, and where the thinking before it ends."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.foundation.errors import InputError
from quire.foundation.registry import Registry
from quire.foundation.shown import shown

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"]
GRAMMAR_BACKENDS = Registry(
    "grammar backend",
    {
        "llguidance": "quire.grammar.llguidance.backend:LLGuidance",
        "xgrammar": "quire.grammar.xgrammar.backend:XGrammar",
    },
    contract="quire.grammar.base:Backend",
    needs=("compile", "recipe", "build", "fill", "way_to_end", "close_soon"),
    is_class=True,
)
BACKEND_PACKAGES = {"llguidance": "quire", "xgrammar": "quire[xgrammar]"}  # what brings the library of that name
RULES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
FIELD = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a user asks for, under the field's usual names: exactly one of the first six."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF
    structural_tag: str | dict[str, Any] | None = None
    backend: str = "auto"  # what the server is told to use, or a name in GRAMMAR_BACKENDS
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    close_at_limit: bool = False  # near max_tokens only what closes the value soonest is allowed

    @classmethod
    def of(cls, fields: dict[str, Any]) -> StructuredOutputsParams:
        """From JSON or a plain dict. Raises InputError for unknown fields and wrong types."""
        unknown = fields.keys() - set(cls.__struct_fields__)
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise InputError(
                f"structured_outputs has the unknown field {shown(min(unknown))}; it may hold {known}", FIELD
            )
        if fields.get("backend") == "guidance":
            fields = {**fields, "backend": "llguidance"}
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InputError):
                raise error.__cause__ from None
            raise InputError(f"structured_outputs: {error}", FIELD) from None

    def __post_init__(self) -> None:
        """Raises InputError unless exactly one rule is given, and options that fit together."""
        given = [name for name in RULES if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise InputError(f"structured_outputs needs exactly one of {', '.join(RULES)}; got {got}", FIELD)
        if self.json_object is False:
            raise InputError("structured_outputs.json_object must be true, or absent", FIELD)
        if self.backend != "auto" and self.backend not in GRAMMAR_BACKENDS:
            known = ", ".join(("auto", *GRAMMAR_BACKENDS))
            raise InputError(f"structured_outputs.backend must be one of {known}; got {shown(self.backend)}", FIELD)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InputError("disable_any_whitespace and whitespace_pattern cannot both be given", FIELD)


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One grammar. Equal specs are compiled once."""

    kind: GrammarKind
    text: str  # JSON text of a schema, a list of choices or a structural tag; else the regex or EBNF itself
    backend: str = "auto"
    whitespace: Literal["bounded", "none"] | str = "bounded"  # between JSON tokens; else a regex
    is_plain: bool = False  # a schema or tag is checked and in plain form (`json_schema.normalize`, `grammar.tags`)


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the reasoning of an answer begins and ends, in token ids. A grammar binds what follows it."""

    end: list[int]
    end_seam: int = 0  # after so many tokens of `end` others may come before the rest: the end of a header, say
    start: list[int] = msgspec.field(default_factory=list)
    # "open": the answer begins inside the reasoning. "maybe": it begins with `start` or with the answer itself.
    state: Literal["open", "maybe"] = "open"
    max_tokens: int | None = None  # then `end` is forced; None: as long as the model likes


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that may be forbidden to one answer, step by step."""

    grammar: GrammarSpec | None = None
    thinking: Thinking | None = None
    close_at_limit: bool = False
