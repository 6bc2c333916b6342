"""Choices, regular expressions, grammars and structural tags: drawn answers, and what is taken by whom."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from quire.foundation.errors import InputError
from quire.grammar.base import Backend
from quire.grammar.tags import plain
from quire.types.structured import GRAMMAR_BACKENDS, GrammarSpec
from tests.grammar.walk import answer, demo, takes

CHOICES = ["a/b\n", '"quoted"', "é😀", "\x01", "ab", "abc", "<|im_end|>", "\\d"]
REGEXES = [
    r"(foo|b/ar)+",
    r"^[a-c]{2}/\d+\.x?$",
    r"[^\s\"]{3,9} \w+@\w+\.com",
    r"(\+\d{1,3}[- ])?(\d{3}-){2}\d{4}",
    r"[α-ω]+|日本",
    r"(?i:yes|no)\.",
    r"a*b?(c|d){2,3}",
]
GRAMMARS = [
    ('root ::= "yes" | "no" num\nnum ::= [0-9]{2,3}', re.compile("yes|no[0-9]{2,3}")),
    ('root ::= expr\nexpr ::= [0-9]+ | "(" expr op expr ")"\nop ::= [-+*]', None),
    ('start: "SELECT " NAME (", " NAME)* ";"\nNAME: /[a-z]+/', re.compile("SELECT [a-z]+(, [a-z]+)*;")),
]


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
def test_choices(name: str) -> None:
    backend, rng = demo(name), random.Random(0)
    grammar = backend.compile(GrammarSpec("choice", json.dumps(CHOICES)))
    drawn = set()
    for _ in range(200):
        text, is_complete = answer(backend, grammar.matcher(), rng, 20)
        assert is_complete
        drawn.add(text.decode())
    assert drawn <= set(CHOICES)
    assert len(drawn) >= len(CHOICES) - 2
    for budget in (1, 2, 3, 12):
        text, is_complete = answer(backend, grammar.matcher(), rng, budget, close_at_limit=True)
        assert is_complete
        assert text.decode() in CHOICES


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
@pytest.mark.parametrize("pattern", REGEXES)
def test_regexes(pattern: str, name: str) -> None:
    backend, rng = demo(name), random.Random(pattern)
    if "(?i" in pattern and name == "xgrammar":
        with pytest.raises(InputError, match="flags"):
            backend.compile(GrammarSpec("regex", pattern))
        return
    grammar = backend.compile(GrammarSpec("regex", pattern))
    way = backend.way_to_end(grammar.matcher())
    assert way is not None
    for _ in range(10):
        budget = rng.randrange(len(way), len(way) + 40)
        text, is_complete = answer(backend, grammar.matcher(), rng, budget, close_at_limit=True)
        assert is_complete, text
        assert re.fullmatch(pattern, text.decode()), text


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
@pytest.mark.parametrize(("source", "pattern"), GRAMMARS)
def test_grammars(source: str, pattern: re.Pattern[str] | None, name: str) -> None:
    backend, rng = demo(name), random.Random(source)
    grammar = backend.compile(GrammarSpec("ebnf", source))
    for _ in range(10):
        text, is_complete = answer(backend, grammar.matcher(), rng, 60, close_at_limit=True)
        assert is_complete, text
        if pattern is None:
            assert re.fullmatch(r"[-+*()0-9]+", text.decode())
            assert text.count(b"(") == text.count(b")")
        else:
            assert pattern.fullmatch(text.decode()), text


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
def test_json_objects(name: str) -> None:
    backend, rng = demo(name), random.Random(1)
    grammar = backend.compile(GrammarSpec("json_object", ""))
    for budget in range(2, 60):
        text, is_complete = answer(backend, grammar.matcher(), rng, budget, close_at_limit=True)
        assert is_complete, text
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("start", ["[", '{"a":', "[1.", "[1e", "[-"])
@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
def test_numbers_stay_finite(start: str, name: str) -> None:
    """Digits only, for as long as they are allowed."""
    backend = demo(name)
    digits = [i for i, token in enumerate(backend.vocabulary.tokens) if token.isdigit()]
    matcher = backend.compile(GrammarSpec("json_schema", "{}")).matcher()
    by_byte = {token[0]: i for i, token in enumerate(backend.vocabulary.tokens) if len(token) == 1}
    text = start
    for byte in start.encode():
        assert matcher.accept(by_byte[byte])
    rng = random.Random(start)
    while allowed := [token for token in _allowed(backend, matcher) if token in digits]:
        token = rng.choice(allowed)
        assert matcher.accept(token)
        text += backend.vocabulary.tokens[token].decode()
        assert len(text) < 80
    assert len(re.findall(r"\d+$", text)[0]) in ((2,) if "e" in start else (32, 1))  # a leading 0 stands alone
    float(text.lstrip('[{"a:'))


def _allowed(backend: Backend, matcher: Any) -> list[int]:
    from tests.grammar.walk import allowed

    return allowed(backend, matcher)


# Structural tags

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": OBJECT}


def seq(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def text(*excludes: str, **more: Any) -> dict[str, Any]:
    return {"type": "any_text", "excludes": list(excludes), **more}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [tag("<f=x>", JSON, "</f>"), tag("<f=y>", text(), "</f>")],
    "excludes": ["<bad>"],
}
TAGS: list[tuple[Any, list[str], list[str]]] = [  # tag, answers, others
    (TRIGGERED, ["", "hi", 'a <f=x>{"a":1}</f> b<f=y>any < </f>.'], ["<f=z", "q <bad>", '<f=x>{"a":""']),
    ({**TRIGGERED, "at_least_one": True}, ["<f=y>any</f> rest"], ["", "x<f=y></f>"]),
    ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["<f=y>any</f>"], ["", "<f=y>any</f>x"]),
    ({**TRIGGERED, "stop_after_first": True}, ["hello", "h<f=y>any</f>"], ["h<f=y>any</f>x"]),
    (seq(text("</t>"), const("</t>"), JSON), ['th</t>{"a":1}', '</</t>{ "a" : 2 }'], ['{"a":1}', "</t>"]),
    (
        seq(tag("<a>", text(), "</a>"), tag("<b>", text(max_chars=3), ["</b>", "</c>"])),
        ["<a>x<</a><b></c>", "<a></a><b>123</b>"],
        ["<a></a><b>1234</b>", "<a></a>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("<a>", JSON, "</a>")], "separator": "\n", "at_least_one": True},
        ['<a>{"a":1}</a>', '<a>{"a":1}</a>\n<a>{"a":2}</a>'],
        ["", '<a>{"a":1}</a>\n'],
    ),
    (
        {"type": "or", "elements": [const("yes"), {"type": "regex", "pattern": r"\d{2}/x"}]},
        ["yes", "12/x"],
        ["no", "1/x", ""],
    ),
    (seq({"type": "grammar", "grammar": 'root ::= "g" [0-9]'}, const("!")), ["g7!"], ["g!", "g7"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
    ({"type": "plus", "content": seq(const("p="), {"type": "optional", "content": const(";")})}, ["p=;p="], ["", ";"]),
    ({"type": "star", "content": const("z")}, ["", "zzz"], ["y"]),
    (seq({"type": "optional", "content": text("x", max_chars=5)}, const("xE")), ["xE", "abcxE"], ["abcdefxE"]),
    (
        {
            "type": "structural_tag",
            "structures": [{"begin": "<q>", "schema": {"type": "integer"}, "end": "</q>"}],
            "triggers": ["<q"],
        },
        ["x <q>12</q> y"],
        ["<q>a"],
    ),
]


@pytest.mark.parametrize(("given", "answers", "others"), TAGS, ids=lambda x: x["type"] if isinstance(x, dict) else "")
@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
def test_structural_tags(given: Any, answers: list[str], others: list[str], name: str) -> None:
    backend, rng = demo(name), random.Random(0)
    once = plain(given, "response_format")
    assert plain(once, "response_format") == once
    grammar = backend.compile(GrammarSpec("structural_tag", once))
    for text_ in answers:
        assert takes(backend, grammar.matcher(), text_), text_
    for text_ in others:
        assert not takes(backend, grammar.matcher(), text_), text_
    way = backend.way_to_end(grammar.matcher())
    assert way is not None
    for _ in range(10):
        budget = rng.randrange(len(way), len(way) + 40)
        drawn, is_complete = answer(backend, grammar.matcher(), rng, budget, close_at_limit=True)
        assert is_complete, drawn


def test_special_tokens_stand_by_their_ids() -> None:
    backend = demo()
    start = backend.vocabulary.special["<|im_start|>"]
    grammar = backend.compile(GrammarSpec("structural_tag", json.dumps(tag("<|im_start|>go", JSON, "<|im_end|>"))))
    matcher = grammar.matcher()
    assert not takes(backend, grammar.matcher(), '<|im_start|>go{"a":1}')
    assert matcher.accept(start)
    assert takes(backend, matcher, 'go{"a":1}')
    assert matcher.is_done, "the stop token at its end is the end of the answer"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "foo"}, "has the type 'foo'"),
        ({"type": "sequence"}, "needs 'elements'"),
        ({"type": "sequence", "elements": [{"type": "regex", "pattern": 1}]}, "$.elements[0].pattern must be a string"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "uses 'not'"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "must be 'json'"),
        ({**TRIGGERED, "triggers": ["<g"]}, "begins with none of the triggers"),
        ({"type": "any_text", "max_tokens": 3}, "'max_tokens', which is not supported"),
        ("{", "not valid JSON"),
        ([], "must be an object"),
    ],
)
def test_tags_that_are_wrong(given: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        plain(given, "response_format")
    assert says in error.value.message
