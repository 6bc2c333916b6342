"""Structured outputs over HTTP: `quire serve` on the demo model, asked by the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
import regex

from tests.server.process import ServerProcess

NAME = "demo"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<v>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</v>"},
}


@pytest.fixture(scope="module")
def server(demo_server: ServerProcess) -> ServerProcess:
    return demo_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_value(text: str) -> bool:
    value = json.loads(text)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(SCHEMA, format_checker=checker).validate(value)
    return True


def of_type(kind: str, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **more}}


ASKED: list[tuple[dict[str, Any], Any]] = [  # extra fields of a request, what holds of its answers
    (of_type("json_schema", json_schema={"name": "x", "strict": True, "schema": SCHEMA}), is_value),
    (of_type("text"), lambda text: len(text) > 0),
    ({"response_format": TAG}, lambda text: is_value(text[3:-4])),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, lambda t: is_value(t) and "\n" not in t),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": " "}}, is_value),
    ({"structured_outputs": {"regex": r"\d{3}-[a-f]{2}"}}, lambda text: re.fullmatch(r"\d{3}-[a-f]{2}", text)),
    ({"structured_outputs": {"choice": ["red", "green", "blue"]}}, lambda text: text in ("red", "green", "blue")),
    ({"structured_outputs": {"grammar": 'root ::= "<" [a-z]{2,4} ">"'}}, lambda t: re.fullmatch("<[a-z]{2,4}>", t)),
    ({"structured_outputs": {"structural_tag": TAG}}, lambda text: is_value(text[3:-4])),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, is_value),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback"}, is_value),
    ({"structured_outputs": {"backend": "xgrammar", "close_at_limit": True, "json": SCHEMA}}, is_value),
    (
        {"structured_outputs": {"backend": "xgrammar", "regex": r"\d{3}-[a-f]{2}"}},
        lambda text: re.fullmatch(r"\d{3}-[a-f]{2}", text),
    ),
    ({"structured_outputs": {"backend": "guidance", "choice": ["red"]}}, lambda text: text == "red"),
    ({"guided_regex": "(yes|no){2}"}, lambda text: re.fullmatch("(yes|no){2}", text)),
    ({"guided_choice": ["one", "two"]}, lambda text: text in ("one", "two")),
    ({"guided_grammar": 'root ::= "a" | "b"'}, lambda text: text in ("a", "b")),
    (
        {"structured_outputs": {"close_at_limit": True}, **of_type("json_object")},
        lambda t: isinstance(json.loads(t), dict),
    ),
]


@pytest.mark.parametrize(("extra", "holds"), ASKED, ids=lambda x: json.dumps(x)[:60] if isinstance(x, dict) else "")
def test_answers_hold_what_was_asked(client: openai.OpenAI, extra: dict[str, Any], holds: Any) -> None:
    options: dict[str, Any] = {
        "model": NAME,
        "prompt": "Who are you?",
        "max_tokens": 90,
        "seed": 1,
        "extra_body": extra,
    }
    whole = client.completions.create(**options, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop" or "response_format" in extra
        assert holds(choice.text), choice.text
    chunks = list(client.completions.create(**options, n=2, stream=True))
    for index, choice in enumerate(whole.choices):
        streamed = "".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == index)
        assert streamed == choice.text


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    kind: Literal["cat", "dog"]
    friends: list[Person] = pydantic.Field(max_length=1)


def test_the_client_parses_what_chat_answers(client: openai.OpenAI) -> None:
    """A recursive class, as the client's own helper sends it."""
    reply = client.chat.completions.parse(
        model=NAME,
        messages=[{"role": "user", "content": "Who are you?"}],
        response_format=Person,
        max_tokens=120,
        seed=3,
        extra_body={"structured_outputs": {"close_at_limit": True}},
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_chat_names_the_field(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"contains": {}}}}
    with pytest.raises(openai.BadRequestError, match=r"response_format: the JSON schema at \$\.properties\.a") as error:
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert error.value.param == "response_format"


FORMAT, FIELD = "response_format", "structured_outputs"
REFUSED: list[tuple[dict[str, Any], str, str]] = [  # extra fields, the field that is named, what the message says
    (of_type("json_schema", json_schema={"schema": {"properties": {"a": {"not": {}}}}}), FORMAT, "$.properties.a"),
    (of_type("json_schema", json_schema={"schema": {"pattern": "^(a)\\1$"}}), FORMAT, "backreferences"),
    ({"structured_outputs": {"regex": "("}}, FIELD, "regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, FIELD, "only one of"),
    ({"structured_outputs": {"grammar": "root ::= missing"}}, FIELD, "missing"),
    ({"structured_outputs": {"choice": [""]}}, FIELD, "non-empty"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, FORMAT, "only one of"),
    ({"structured_outputs": {"backend": "outlines", "regex": "a"}}, FIELD, "backend"),
    ({"structured_outputs": {"backend": "xgrammar", "regex": "(?=a)b"}}, FIELD, "look-around"),
    ({"structured_outputs": {"backend": "xgrammar", "json": {"allOf": [{"minimum": 1}] * 2}}}, FIELD, "$.allOf"),
    ({"structured_outputs": {"backend": "xgrammar", "json": {}, "disable_any_whitespace": True}}, FIELD, "whitespace"),
]


@pytest.mark.parametrize(
    ("extra", "field", "says"), REFUSED, ids=lambda x: json.dumps(x)[:60] if isinstance(x, dict) else ""
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400(
    client: openai.OpenAI, extra: dict[str, Any], field: str, says: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=NAME, prompt="Hi", max_tokens=5, extra_body=extra, stream=stream)
    assert says in error.value.message
    assert error.value.param == field


def long(schema: dict[str, Any]) -> dict[str, Any]:
    """It says the same in so many characters that the server does not look into it itself."""
    return {**schema, "description": "é" * 20_000}


LONG: dict[str, Any] = {  # by the field that the error names
    "response_format": lambda schema: of_type("json_schema", json_schema={"name": "x", "schema": schema}),
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema}},
    "guided_json": lambda schema: {"guided_json": schema},
    "text": lambda schema: {"structured_outputs": {"json": json.dumps(schema)}},
    "tag": lambda schema: {"structured_outputs": {"structural_tag": {"type": "json_schema", "json_schema": schema}}},
    "closed": lambda schema: {"structured_outputs": {"json": schema, "disable_additional_properties": True}},
}


@pytest.mark.parametrize("given", LONG)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_long_schemas(client: openai.OpenAI, given: str, endpoint: str) -> None:
    def ask(schema: dict[str, Any]) -> Any:
        more: Any = {"model": NAME, "max_tokens": 200, "seed": 3, "extra_body": LONG[given](long(schema))}
        more["extra_body"].setdefault("structured_outputs", {})["close_at_limit"] = True
        if endpoint == "chat":
            return client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **more)
        return client.completions.create(prompt="Hi", **more)

    choice = ask(SCHEMA).choices[0]
    assert is_value(choice.text if endpoint == "completions" else choice.message.content or "")
    with pytest.raises(openai.BadRequestError, match=r"schema at \$.*\.properties\.a uses 'contains'") as error:
        ask({"type": "object", "properties": {"a": {"contains": {}}}})
    assert error.value.param == ("response_format" if given == "response_format" else "structured_outputs")


# What binds content beside tools: rules, and which texts, or beginnings of them, they allow
INTEGER = {"type": "integer"}
NUMBERED = {"type": "object", "properties": {"x": INTEGER}, "required": ["x"], "additionalProperties": False}
BESIDE_TOOLS: dict[str, tuple[Any, str]] = {
    "json": (NUMBERED, r"\{\s*\"x\"\s*:\s*-?\d+\s*\}"),
    "json_object": (True, r"(?s)\{.*"),
    "regex": (r"\d{3}-[a-f]{2}", r"\d{3}-[a-f]{2}"),
    "choice": (["red", "green"], "red|green"),
    "grammar": ('root ::= "[" [a-z]{2,4} "]"', r"\[[a-z]{2,4}\]"),
    "structural_tag": ({**TAG, "format": {"type": "regex", "pattern": "v[0-9]{2}"}}, "v[0-9]{2}"),
}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
TOOL = {"name": "look", "description": "Look up something.", "parameters": PARAMETERS}


def parts_of(reply: dict[str, Any]) -> Iterator[tuple[str, bool, bool]]:
    """Of each answer its content, whether it calls, and whether it was cut."""
    for choice in reply.get("choices", ()):
        message = choice["message"]
        yield message["content"] or "", bool(message.get("tool_calls")), choice["finish_reason"] == "length"
    if "output" in reply:
        texts = [part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]]
        yield "".join(texts), "function_call" in {i["type"] for i in reply["output"]}, reply["status"] == "incomplete"


@pytest.mark.parametrize("tool_choice", ["auto", "none", "required", "named"])
@pytest.mark.parametrize("kind", BESIDE_TOOLS)
def test_beside_tools_an_answer_is_a_call_or_bound(server: ServerProcess, kind: str, tool_choice: str) -> None:
    """However short it is cut, it holds no text that is neither. What cannot be bound is refused."""
    rule, pattern = BESIDE_TOOLS[kind]
    ask: dict[str, Any] = {"structured_outputs": {kind: rule}, "seed": 1, "temperature": 1.0}
    is_named = tool_choice == "named"
    chat = {
        "messages": [{"role": "user", "content": "Look up jam."}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "look"}} if is_named else tool_choice,
        "n": 2,
    }
    responses = {
        "input": "Look up jam.",
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "function", "name": "look"} if is_named else tool_choice,
        "store": False,
    }
    for path, body in (
        ("chat/completions", {**ask, **chat, "max_tokens": 30}),
        ("chat/completions", {**ask, **chat, "max_tokens": 4}),
        ("responses", {**ask, **responses, "max_output_tokens": 4}),
    ):
        answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
        if is_named:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "structured_outputs"
            continue
        assert answer.status_code == 200, answer.text
        for content, calls, is_cut in parts_of(answer.json()):
            assert not (calls and tool_choice == "none")
            assert content == "" or tool_choice != "required"
            if content:
                assert regex.fullmatch(pattern, content, partial=is_cut), content
            elif not is_cut:
                assert calls


def test_hostile_schemas_harm_no_neighbour(server: ServerProcess) -> None:
    """They are compiled, and refused, while another answer goes on."""
    inner: Any = {"type": "integer"}
    for _ in range(11):
        inner = {"oneOf": [inner, {"type": "object", "properties": {"k": inner}, "required": ["k"]}]}
    body = {"model": NAME, "prompt": "Count to ten:", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as neighbour:
        hostile = {"model": NAME, "prompt": "x", "structured_outputs": {"json": inner}}
        refused = httpx.post(f"{server.url}/v1/completions", json=hostile, timeout=60)
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in neighbour.iter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"]
        )
    assert refused.status_code == 400
    assert text == alone
