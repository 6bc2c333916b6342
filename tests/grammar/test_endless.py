"""Which definitions have no finite value: told as a slow, plain reading tells it, in one look at each."""

from __future__ import annotations

import random
from typing import Any

from quire.grammar.json_schema.endless import endless
from quire.grammar.json_schema.normalize import plain
from quire.grammar.json_schema.references import References


def made_up(rng: random.Random, count: int) -> dict[str, Any]:
    def part(depth: int) -> Any:
        kind = rng.randrange(7) if depth else rng.choice((0, 1))
        if kind == 0:
            return {"$ref": f"#/$defs/d{rng.randrange(count)}"}
        if kind == 1:
            return rng.choice([{"type": "null"}, {"const": 1}, {"type": ["object", "string"]}, {}, True])
        if kind == 2:
            return {"anyOf": [part(depth - 1) for _ in range(rng.randrange(1, 3))]}
        if kind == 3:
            return {"allOf": [part(depth - 1) for _ in range(2)]}
        if kind == 4:
            return {"type": "object", "properties": {"a": part(depth - 1), "b": part(depth - 1)}, "required": ["a"]}
        if kind == 5:
            return {"type": "array", "prefixItems": [part(depth - 1)], "items": part(depth - 1), "minItems": 2}
        return {"type": ["array", "object"], "items": part(depth - 1), "minItems": rng.randrange(2), "required": ["z"]}

    return {"anyOf": [part(1), {"type": "null"}], "$defs": {f"d{i}": part(2) for i in range(count)}}


def is_finite(schema: Any, known: set[str]) -> bool:
    if not isinstance(schema, dict) or "const" in schema:
        return True
    if "$ref" in schema and schema["$ref"] not in known:
        return False
    if not all(is_finite(part, known) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(is_finite(part, known) for part in schema["anyOf"]):
        return False
    kinds = schema.get("type", "null")
    ways = []
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind == "object":
            needed = [schema.get("properties", {}).get(name) for name in schema.get("required", ())]
        elif kind == "array":
            least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
            needed = [*prefix[:least], *([schema.get("items")] if least > len(prefix) else [])]
        else:
            needed = []
        ways.append(all(is_finite(part, known) for part in needed))
    return any(ways)


def test_endless_definitions_are_those_of_the_plain_reading() -> None:
    num_endless = 0
    for seed in range(400):
        schema = made_up(random.Random(seed), 6)
        looks: list[str] = []

        def target(reference: str, schema: Any = schema, looks: list[str] = looks) -> Any:
            looks.append(reference)
            return References(schema).find(reference)

        found = endless(schema, target)
        assert len(looks) == len(set(looks)), "each definition is looked at once"
        definitions = {f"#/$defs/{name}": part for name, part in schema["$defs"].items()}
        known: set[str] = set()
        for _ in definitions:
            known |= {name for name, part in definitions.items() if is_finite(part, known)}
        assert found == min(set(looks) - known, default=None), seed
        num_endless += found is not None
    assert 50 < num_endless < 350


def test_long_chains_of_references_are_followed() -> None:
    """As many as fit: this took the server's loop most of a minute, when each was looked for again and again."""
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(3000)}
    plain({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {"type": "null"}}}, "json")
    anchors = {f"d{i}": {"$anchor": f"a{i}"} for i in range(3000)}
    plain({"anyOf": [{"$ref": f"#a{i}"} for i in range(3000)], "$defs": anchors}, "json")
