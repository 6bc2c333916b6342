"""Tool calls in every format, streamed as whole. The full sweep is `python -m benchmarks.parsers`."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from benchmarks.parser_answers import WRITERS, make
from benchmarks.parsers import check_answer, check_broken, join, read
from quire.parsers.base import TOOL_FORMATS
from quire.parsers.reasoning.channels import HARMONY
from quire.types.reply import Tool
from tests.effort import some

ANSWERS = some(3)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "list": {"type": "array"},
        "choice": {"enum": ["1", 2]},
        "ref": {"$ref": "#/$defs/N"},
        "any": {},
    },
    "$defs": {"N": {"type": "integer"}},
}
TOOLS = [Tool("f", parameters=SCHEMA), Tool("g")]


def whole(name: str, text: str, *, parallel: bool = True) -> list[tuple[Any, ...]]:
    """The joined pieces of an answer, which is also read one character at a time."""
    form = TOOL_FORMATS.get(name)
    found = join(read(form, TOOLS, [text], parallel=parallel))
    assert join(read(form, TOOLS, list(text), parallel=parallel)) == found
    return found


def arguments(found: list[tuple[Any, ...]]) -> list[Any]:
    return [json.loads(item[2]) for item in found if item[0] == "arguments"]


def test_every_format_has_a_writer() -> None:
    assert set(WRITERS) == set(TOOL_FORMATS)
    assert len(WRITERS) == 44


@pytest.mark.parametrize("name", WRITERS)
def test_however_cut(name: str) -> None:
    rng = random.Random(name)
    for _ in range(ANSWERS):
        answer = make(name, rng)
        check_answer(name, answer, rng)
        for _ in range(3):
            check_broken(name, answer, rng)


@pytest.mark.parametrize("name", WRITERS)
def test_text_without_calls_is_content(name: str) -> None:
    text = " \n  if a < b and c[0] > {1: 2}[1]:\n    f(x, y='z') <b>bold</b> ``` [link](x) 😀 \n\n"
    assert whole(name, text) == [("content", text)]


@pytest.mark.parametrize("name", WRITERS)
def test_cut_off_arguments_have_no_end(name: str) -> None:
    text = WRITERS[name].calls([("f", {"text": "A rather long string " * 4})], random.Random(1))
    found = whole(name, text[: text.index("long")])
    if name == "xlam" or ("start", 0, "f") in found:
        assert [item[0] for item in found] == ["start", "arguments"]
        assert found[1][2].endswith("A rather ")


@pytest.mark.parametrize(
    "inner",
    [
        '{"name": "f"}',
        '{"arguments": {}, "name": "f"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": ""}',
        '{"id": {"x": ["}"]}, "name": "f", "arguments": {}}',
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f", "arguments": {}}}',
    ],
)
def test_ways_to_write_a_call_without_arguments(inner: str) -> None:
    found = whole("hermes", f"a\n<tool_call>\n{inner}\n</tool_call>\nb")
    assert found == [("content", "a"), ("start", 0, "f"), ("arguments", 0, "{}"), ("end", 0), ("content", "\nb")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <tool_call>\nnot json</tool_call> b"),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"'),
        ("llama3_json", '{"name": "Bob", "age": 3} and {"parameters": {}}'),
        ("llama3_json", '{"name": "Bob"}'),
        ("pythonic", "[f(1, 2)] or [f(x)] or [f] or [unknown()](https://example.org)"),
        ("qwen3_coder", "<function=f some text"),
        ("qwen3_coder", "<tool_call>\n<function=f>\nsome text</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\nsome text</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|>text<|tool_calls_section_end|>"),
        ("mistral", "[TOOL_CALLS] what is this?"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("openai", "plain text, no channels"),
    ],
)
def test_markup_that_is_no_call_is_content(name: str, text: str) -> None:
    assert whole(name, text) == [("content", text)]


def test_a_call_behind_broken_markup_is_found() -> None:
    found = whole("hermes", 'x <tool_call> y <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert [item[0] for item in found] == ["content", "start", "arguments", "end"]
    assert found[0] == ("content", "x <tool_call> y")


def test_text_between_calls_of_a_section_is_kept() -> None:
    found = whole("hermes", '<tool_call>{"name": "f"} and {then</tool_call> more')
    assert found[-1] == ("content", "and {then more")


def test_arguments_that_are_not_json_come_as_they_are() -> None:
    found = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call>b')
    assert found == [("start", 0, "f"), ("arguments", 0, '{"a": nope}'), ("content", "b")]
    found = whole("jamba", '<tool_calls>[{"name": "f", "arguments": {"a": .5}}, {"name": "g"}]</tool_calls>')
    assert [item[0] for item in found] == ["start", "arguments", "start", "arguments", "end"]


def test_line_breaks_in_strings_are_escaped() -> None:
    found = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n\t2\x01\\\\"}}</tool_call>')
    assert arguments(found) == [{"a": "1\n\t2\x01\\"}]


def test_deep_nesting_ends_a_call_and_nothing_else() -> None:
    deep = "[" * 5000
    for name, text in (
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}'),
        ("pythonic", f"[f(a={deep}"),
        ("gemma4", f"<|tool_call>call:f{{a:{deep}"),
        ("qwen3_coder", f"<function=f>\n<parameter=list>\n{deep}\n</parameter>\n</function>"),
        ("minimax_m3", "]<]minimax[>[<tool_call>\n" + ']<]minimax[>[<invoke name="g">' + "]<]minimax[>[<a>" * 5000),
    ):
        found = whole(name, text)
        assert found[0] == ("start", 0, "g" if name == "minimax_m3" else "f")


def test_only_the_first_of_several_calls() -> None:
    text = 'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "g"}</tool_call> c'
    found = whole("hermes", text, parallel=False)
    assert found == [("content", "a"), ("start", 0, "f"), ("arguments", 0, "{}"), ("end", 0), ("content", " b c")]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "null", "null"),
        ("text", " 5 ", " 5 "),
        ("text", "", ""),
        ("text", "\n x\n", "\n x\n"),
        ("text", "</parameter> and </function>", "</parameter> and </function>"),
        ("text", "<parameter=x>", "<parameter=x>"),
        ("count", " 5 ", 5),
        ("count", "5.0", 5.0),
        ("count", "007", 7),
        ("count", "five", "five"),
        ("ratio", "1", 1),
        ("ratio", ".5", 0.5),
        ("ratio", "nan", "nan"),
        ("on", "True", True),
        ("on", "false", False),
        ("maybe", "null", None),
        ("maybe", "nullable", "nullable"),
        ("either", "12", 12),
        ("either", "twelve", "twelve"),
        ("list", '[1, "a"]', [1, "a"]),
        ("list", "[1, 'a', None]", [1, "a", None]),
        ("choice", "1", "1"),
        ("choice", "2", 2),
        ("ref", "3", 3),
        ("any", "4", "4"),
        ("unknown", "4", "4"),
    ],
)
def test_bare_text_is_typed_by_the_schema(key: str, text: str, value: object) -> None:
    found = whole(
        "qwen3_coder",
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>",
    )
    assert [item[0] for item in found] == ["start", "arguments", "end"]
    assert arguments(found) == [{key: value}]
    assert type(arguments(found)[0][key]) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'it\'s'", "it's"),
        ("'it's'", "it's"),
        (r'"\x41\u00e9\U0001f600\101\q\/"', "Aé😀\\101\\q/"),
        (r'"\ud83d\ude00"', "😀"),
        ("-1_000", -1000),
        (".5", 0.5),
        ("1e5", 1e5),
        ("+7", 7),
        ("(1, 'a')", [1, "a"]),
        ("{'a': [True, None], 'b': {}}", {"a": [True, None], "b": {}}),
        ("[false, null,]", [False, None]),
    ],
)
def test_python_values(text: str, value: object) -> None:
    assert arguments(whole("pythonic", f"[f(a={text}, b=1)]")) == [{"a": value, "b": 1}]


def test_half_a_surrogate_pair_can_be_sent() -> None:
    for name, text in (
        ("pythonic", '[f(a="\\ud800", b={"\\ud800": 1})]'),
        ("hermes", r'<tool_call>{"name": "\ud800", "arguments": "{\"\ud800\": 1}"}</tool_call>'),
    ):
        for item in whole(name, text):
            str(item[-1]).encode()


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>First this.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"count": 1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|><|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    assert whole("openai", text) == [
        ("reasoning", "Think."),
        ("content", "First this."),
        ("start", 0, "f"),
        ("arguments", 0, '{"count": 1}'),
        ("end", 0),
        ("start", 1, "g"),
        ("arguments", 1, "{}"),
        ("end", 1),
        ("content", "Done."),
    ]


@pytest.mark.parametrize("end", ["<", "a <", "<|", "<|en", "x<y <|start"])
@pytest.mark.parametrize("channel", ["analysis", "commentary", "final"])
def test_harmony_text_may_end_like_a_marker_begins(channel: str, end: str) -> None:
    """Its markers are tokens: half of one is what the model wrote."""
    kind = "reasoning" if channel == "analysis" else "content"
    head = f"<|channel|>{channel}<|message|>"
    assert whole("openai", f"{head}Is 1 {end}") == [(kind, f"Is 1 {end}")]
    parsed = HARMONY.parser("", {}, raw_calls=True)
    pieces = [piece for char in f"{head}Is 1 {end}" for piece in parsed.feed(char)] + parsed.finish()
    assert "".join(getattr(piece, "text", "") for piece in pieces) == f"Is 1 {end}"


def test_ids() -> None:
    for name, pattern in (("mistral", "[A-Za-z0-9]{9}"), ("hermes", "chatcmpl-tool-[0-9a-f]{16}")):
        calls = [("f", {}), ("g", {}), ("f", {})]
        text = WRITERS[name].calls(calls, random.Random(3))
        ids = [piece.id for piece in read(TOOL_FORMATS.get(name), TOOLS, [text]) if hasattr(piece, "id")]
        assert len(set(ids)) == 3
        assert all(re.fullmatch(pattern, one) for one in ids)


def test_a_long_answer_takes_linear_work() -> None:
    """Steps of the scanner, not time: what has been read is not kept, nor read again."""
    form = TOOL_FORMATS.get("hermes")
    parser = form.parser([], parallel=True)
    longest = 0
    for portion in [
        '<tool_call>{"name": "f", "arguments": {"a": "',
        *["some text "] * 2000,
        '"}}</tool_call>',
        *"  <x> " * 99,
    ]:
        parser.feed(portion)
        longest = max(longest, len(parser._scanner.text))
    assert longest < 64
