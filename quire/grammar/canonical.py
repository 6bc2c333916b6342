"""A grammar as backends read it."""

from __future__ import annotations

import msgspec

from quire.grammar import tags
from quire.grammar.json_schema import normalize as json_schema
from quire.types.structured import FIELD, GrammarSpec


def canonical(spec: GrammarSpec) -> GrammarSpec:
    """Schemas and tags in plain form. Raises InputError."""
    if spec.is_plain or spec.kind not in ("json_schema", "structural_tag"):
        return spec
    reader = json_schema if spec.kind == "json_schema" else tags
    return msgspec.structs.replace(spec, text=reader.plain(spec.text, FIELD), is_plain=True)
