"""Made-up JSON schemas, each with at least one value, of all the keywords that can be enforced."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = [
    "id",
    "name",
    "größe",
    "a b",
    'quo"te',
    "items",
    "$type",
    "not",
    "x",
    "very_long_property_name",
    "emoji😀",
    "\\",
]
PATTERNS = ["^[a-z]{3,8}$", r"^\d{4}-[A-F]+$", "foo|bar", r"^\w+ \w+$", "^(yes|no)(!|\\?)$", '^[^"\\\\]{2,5}$', "^ü+$"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "json-pointer", "password"]
VALUES = [None, True, 0, -17, 2.5, "", "text", "ünï\n", [], [1, "a"], {}, {"k": [None]}]


def make_schema(seed: int, depth: int = 4) -> Schema:
    rng = random.Random(seed)
    maker = _Maker(rng)
    schema = maker.schema(depth)
    if maker.definitions:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": maker.definitions, **schema}
    return schema


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.definitions: dict[str, Schema] = {}
        self.is_defining = False  # then nothing refers to a definition: it could need itself

    def schema(self, depth: int) -> Schema:
        plain: list[Callable[[], Schema]] = [self.string, self.string, self.number, self.integer, self.choice]
        nested: list[Callable[[int], Schema]] = [
            self.object,
            self.object,
            self.array,
            self.any_of,
            self.one_of,
            self.all_of,
        ]
        if depth == 0 or self.rng.random() < 0.15:
            return self.rng.choice(plain)()
        if self.rng.random() < 0.15 and not self.is_defining:
            return self.reference(depth)
        found = self.rng.choice(nested)(depth - 1)
        if self.rng.random() < 0.2:
            found["description"] = "says nothing"
        return found

    def string(self) -> Schema:
        kind = self.rng.randrange(5)
        if kind == 0:
            return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.rng.choice(FORMATS)}
        if kind == 2:
            low = self.rng.randrange(6)
            return {"type": "string", "minLength": low, "maxLength": low + self.rng.randrange(10)}
        return {"type": self.rng.choice(["string", ["string", "null"], "boolean"])}

    def integer(self) -> Schema:
        low = self.rng.randrange(-1000, 1000)
        found: Schema = {"type": "integer"}
        if self.rng.random() < 0.5:
            found[self.rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self.rng.random() < 0.5:
            found[self.rng.choice(["maximum", "exclusiveMaximum"])] = low + self.rng.randrange(2, 5000)
        if len(found) == 1 and self.rng.random() < 0.5:
            found["multipleOf"] = self.rng.choice([2, 5, 10])
        return found

    def number(self) -> Schema:
        low = round(self.rng.uniform(-10, 10), 2)
        return {"type": "number"} | self.rng.choice(
            [{}, {"minimum": low, "maximum": low + 3.5}, {"exclusiveMinimum": 0}]
        )

    def choice(self) -> Schema:
        if self.rng.random() < 0.5:
            return {"const": self.rng.choice(VALUES)}
        return {"enum": self.rng.sample(VALUES, self.rng.randrange(1, 5))}

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, self.rng.randrange(0, 5))
        found: Schema = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        if names and self.rng.random() < 0.8:
            found["required"] = self.rng.sample(names, self.rng.randrange(1, len(names) + 1))
        rest = self.rng.randrange(6)
        if rest < 3:
            found["additionalProperties"] = False
        elif rest == 3:
            found["additionalProperties"] = self.schema(0)
        elif rest == 4:
            found["patternProperties"] = {"^x-": self.schema(0)}
            found["unevaluatedProperties"] = False
        return found

    def array(self, depth: int) -> Schema:
        found: Schema = {"type": "array", "items": self.schema(depth)}
        if self.rng.random() < 0.5:
            low = self.rng.randrange(3)
            found |= {"minItems": low, "maxItems": low + self.rng.randrange(4)}
        if self.rng.random() < 0.2:
            found["prefixItems"] = [self.schema(0), self.schema(0)]
        return found

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth) for _ in range(self.rng.randrange(1, 4))]}

    def one_of(self, depth: int) -> Schema:
        """Told apart by a constant, as unions of classes are."""
        branches = []
        for kind in ("cat", "dog", "fox")[: self.rng.randrange(1, 4)]:
            properties = {"kind": {"const": kind}, "detail": self.schema(depth)}
            branches.append({"type": "object", "properties": properties, "required": ["kind"]})
        return {"oneOf": branches}

    def all_of(self, depth: int) -> Schema:
        first = {"type": "object", "properties": {"left": self.schema(depth)}, "required": ["left"]}
        return {"allOf": [first, {"properties": {"right": self.schema(0)}, "required": ["right"]}]}

    def reference(self, depth: int) -> Schema:
        """To a definition, which may hold itself where nothing need be."""
        name = f"def{self.rng.randrange(3)}"
        if name not in self.definitions:
            self.is_defining = True
            child = {"$ref": f"#/$defs/{name}"}
            self.definitions[name] = {
                "type": "object",
                "properties": {"value": self.schema(max(0, depth - 2)), "children": {"type": "array", "items": child}},
                "required": ["value"],
                "additionalProperties": False,
            }
            self.is_defining = False
        return {"$ref": f"#/$defs/{name}"}
