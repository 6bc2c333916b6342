"""Hostile grammars, for `benchmarks.hostile`."""

from __future__ import annotations

from typing import Any

from benchmarks.hostile.clients import Post

PATH = "/v1/completions"
ANSWER = 8  # tokens of an answer under a grammar that is taken
TAKEN = {"json": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}
REFUSED = {"json": {"not": {"type": "string"}}}


def nested_unions(depth: int) -> Any:
    inner: Any = {"type": "integer"}
    for _ in range(depth):
        inner = {"oneOf": [inner, {"type": "object", "properties": {"k": inner}, "required": ["k"]}]}
    return inner


def chain(count: int, back: bool) -> Any:
    step = -1 if back else 1
    links = {f"d{i:05}": {"allOf": [{"$ref": f"#/$defs/d{i + step:05}"}]} for i in range(1, count)}
    ends = {"d00000": {"type": "null"}, f"d{count:05}": {"type": "null"}}
    return {"$ref": f"#/$defs/d{count - 1 if back else 1:05}", "$defs": {**links, **ends}}


def wishes() -> dict[str, dict[str, Any]]:
    """Values of structured_outputs by name."""
    bomb: Any = {f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 9 + [{"type": "null"}]} for i in range(12)}
    bomb["l12"] = {"type": "object", "properties": {"v": {"type": "string"}}}
    deep: Any = {}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}} if not deep else {"items": deep}
    keys = {f"p{i}": {"type": "string", "pattern": f"^(a|b){{{i % 50}}}.*c$"} for i in range(390)}
    union = {"type": "json_schema", "json_schema": nested_unions(3)}
    words = "|".join(f"w{i}{'x' * (i % 7)}" for i in range(9000))
    rules = "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a" r{i + 1}' for i in range(40)) + '\nr40 ::= "x" | "y"'
    return {
        "nested unions": {"json": nested_unions(11)},
        "reference bomb": {"json": {"$ref": "#/$defs/l0", "$defs": bomb}},
        "references forward": {"json": chain(2500, False)},
        "references backward": {"json": chain(2500, True)},
        "nested 60 deep": {"json": deep},
        "nested 20,000 deep": {"json": '{"items":' * 20_000 + "{}" + "}" * 20_000},
        "enum of 25,000": {"json": {"enum": [f"v{i:05}" for i in range(25_000)]}},
        "union of 9,000": {"json": {"anyOf": [{"const": f"{i} {i * 7}"} for i in range(4_500)]}},
        "390 patterns": {"json": {"type": "object", "properties": keys}},
        "products of lengths": {
            "json": {"allOf": [{"anyOf": [{"maxLength": i + j} for j in range(9)]} for i in range(40)]}
        },
        "maxLength of 10^9": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
        "(a+)+$": {"regex": "(a+)+$"},
        "((a|aa)+)+b": {"regex": "((((a|aa)+)+)+)+b"},
        "states of .*a.{n}": {"regex": "(.*a.{20}){20}"},
        "repeats of repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}b{9,99999}"},
        "nested 5,000 groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
        "9,000 words": {"regex": f"({words})*"},
        "64 KiB of a pattern": {"regex": "(a|b)*" * 10_000},
        "a megabyte of a pattern": {"regex": "ab?" * 350_000},
        "a pattern in JSON": {"json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$" + "(.*x){200}"}},
        "an ambiguous grammar": {"grammar": 'root ::= s\ns ::= s s s | s s | "a"'},
        "a doubling grammar": {"grammar": f"root ::= r0\n{rules}"},
        "left recursion": {"grammar": 'root ::= root "a" | root root | "b"'},
        "3,000 open groups": {"grammar": "root ::= " + "(" * 3000},
        "10,000 choices": {"choice": [f"choice {i} {i * i}" for i in range(10_000)]},
        "tags": {
            "structural_tag": {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{"begin": f"<t{i}>", "content": union, "end": "<"} for i in range(300)],
            }
        },
    }


class Grammars:
    """backend: that compiles them."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def hostile(self) -> dict[str, Post]:
        return {name: Post(PATH, self._body(wish)) for name, wish in wishes().items()}

    def harmless(self, post: Post, is_taken: bool) -> Post:
        return Post(post.path, self._body(TAKEN if is_taken else REFUSED))

    def _body(self, wish: dict[str, Any]) -> dict[str, Any]:
        asked = {**wish, "backend": self._backend}
        return {"prompt": "x", "max_tokens": ANSWER, "stream": True, "structured_outputs": asked}
