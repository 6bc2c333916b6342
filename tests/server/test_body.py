"""How bodies are read: what is long and need not be looked into stays text, and depth is seen before that."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import orjson
import pytest

from quire.foundation.aside import LONG as LONG_BODY
from quire.foundation.errors import ContextLengthError, InputError
from quire.server.http import shape
from quire.server.http.body import SCHEMAS, parse
from quire.types.json_text import JsonText

LONG = {"type": "object", "description": 'é"\\ \u2028' * LONG_BODY, "properties": {"a": {"enum": [1.5, None, "]}"]}}}
SHORT = {"type": "object"}


def bodies(schema: Any) -> list[dict[str, Any]]:
    """Each place that may hold one, beside much else."""
    rest = {"prompt": "x" * LONG_BODY, "n": 1, "stop": ["a", "b"]}
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}},
        {"structured_outputs": {"json": schema, "backend": "auto"}},
        {"structured_outputs": {"structural_tag": schema}, **rest},
        {"guided_json": schema, **rest},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}, **rest},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], **rest},
    ]


def looked_into(value: Any) -> Any:
    if isinstance(value, JsonText):
        return json.loads(value)
    if isinstance(value, dict):
        return {key: looked_into(item) for key, item in value.items()}
    return value


def texts(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(texts, value.values()))
    return int(isinstance(value, JsonText))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("schema", [LONG, SHORT, json.dumps(LONG), True, None])
def test_bodies_are_what_they_were(schema: Any, indent: int | None) -> None:
    for body in bodies(schema):
        found = parse(json.dumps(body, indent=indent, ensure_ascii=indent is None).encode(), SCHEMAS)
        assert looked_into(found) == body
        assert texts(found) == (schema is LONG and "tools" not in body)


@pytest.mark.parametrize(
    "broken", [b'{"a" 1}', b'{"a": 01}', b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": [1,]}', b'{"a": {"b": tru}}', b"{"]
)
def test_what_is_no_json(broken: bytes) -> None:
    for body in bodies("HERE"):
        raw = json.dumps(body).encode()
        raw = raw.replace(b'"HERE"', broken[:-1] + b', "x": "' + b"y" * LONG_BODY + b'"}')
        with pytest.raises((ValueError, orjson.JSONDecodeError)):
            parse(raw, SCHEMAS)


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max((depth(item) for item in (value.values() if isinstance(value, dict) else value)), default=0)


def nested(draw: random.Random, most: int) -> Any:
    if most == 0 or draw.random() < 0.3:
        return draw.choice(['a"[[{', "\\", '\\"', "[", "}}]}", 1, None, 'x\\\\"{', [], {}])
    count = draw.randint(1, 3)
    if draw.random() < 0.5:
        return [nested(draw, most - 1) for _ in range(count)]
    return {draw.choice(['"', "[", "k", "\\"]) + str(i): nested(draw, most - 1) for i in range(count)}


def test_depth_is_that_of_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    for _ in range(500):
        value = [nested(draw, draw.randint(1, 9))]
        raw = json.dumps(value, indent=draw.choice([None, 1])).encode()
        monkeypatch.setattr(shape, "SCANNED_AT_ONCE", draw.choice([3, 50, 1000]))
        monkeypatch.setattr(shape, "MAX_JSON_DEPTH", depth(value))
        shape.check_shape(raw)
        monkeypatch.setattr(shape, "MAX_JSON_DEPTH", depth(value) - 1)
        with pytest.raises(InputError, match="deeper than"):
            shape.check_shape(raw)


def num_values(value: Any) -> int:
    """One, and one for each comma."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(num_values(item) - 1 for item in inside) + max(0, len(inside) - 1)


def test_values_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(6)
    for _ in range(200):
        value = [nested(draw, draw.randint(1, 9)), 'a,"\\', {",": ","}]
        raw = json.dumps(value, indent=draw.choice([None, 1])).encode()
        monkeypatch.setattr(shape, "SCANNED_AT_ONCE", draw.choice([3, 50, 1000]))
        monkeypatch.setattr(shape, "MAX_JSON_DEPTH", depth(value))
        monkeypatch.setattr(shape, "MAX_VALUES", num_values(value) - 1)
        with pytest.raises(InputError, match="holds too much"):
            shape.check_shape(raw)
        monkeypatch.setattr(shape, "MAX_VALUES", num_values(value))
        shape.check_shape(raw)


def text_of(draw: random.Random, letters: str) -> str:
    return "".join(draw.choices(letters, k=draw.randint(0, 400)))


@pytest.mark.parametrize("ascii_only", [False, True])
def test_characters_of_a_text_are_never_overcounted(ascii_only: bool) -> None:
    draw = random.Random(7)
    for letters in ("ab", 'a"\\/u', "\\u", "é€a", "𒀀", "\n\t\x01", '"𒀀\\ué\n'):
        for _ in range(50):
            text = text_of(draw, letters)
            piece = json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode()
            plain = np.frombuffer(piece.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
            least = shape._least_chars(piece, plain)
            assert least <= len(text)
            if not ascii_only and letters in ("ab", "é€a", "𒀀"):
                assert least == len(text)
            if letters == "𒀀":
                assert 2 * least >= len(text)


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ('{"prompt": "TEXT"}', True),
        ('{"n": 1, "prompt": ["a", "TEXT"]}', True),
        ('{"messages": [{"role": "user", "content" : "TEXT"}]}', True),
        ('{"messages": [{"role": "user", "content": "say \\"TEXT\\""}]}', True),
        ('{"stop": "TEXT"}', False),  # of which a limit of its own says more
        ('{"prompt_embeds": ["TEXT", "TEXT"]}', False),
    ],
)
def test_a_text_that_no_prompt_may_have_is_refused_off_the_bytes(
    body: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "SCANNED_AT_ONCE", 100)
    monkeypatch.setattr(shape, "MAX_VALUES", 50)
    raw = body.replace("TEXT", "x" * 1500).encode()
    shape.check_shape(raw, 1500)
    if is_refused:
        with pytest.raises(ContextLengthError, match=r"too long: at least 1\d{3} characters > 1000"):
            shape.check_shape(raw, 1000)
    else:
        shape.check_shape(raw, 1000)


@pytest.mark.parametrize("size", range(3, 60))
def test_a_key_that_lies_in_two_pieces_is_a_key(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "SCANNED_AT_ONCE", size)
    monkeypatch.setattr(shape, "MAX_VALUES", 20)
    long = "x" * 1500
    shape.check_shape(json.dumps({"n": 1, "stop": long}).encode(), 1000)
    shape.check_shape(json.dumps({"prompt_embeds": [long], "guided_regex": long}).encode(), 1000)
    with pytest.raises(ContextLengthError):
        shape.check_shape(json.dumps({"prompt_embeds": "", "prompt": long}).encode(), 1000)
