"""The chat template says what the corpus says, in transformers' environment and in a bare sandbox."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from demo import chat, corpus

MODEL = Path(__file__).parents[2] / "quire" / "demo_model"
CALL = {"name": "get_time", "arguments": {"city": "Zoë's <Town>"}}


@cache
def template() -> Template:
    """Compiled as servers do it: sandboxed, with a `tojson` that leaves every character alone."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(chat.template())


def render(messages: list[chat.Message], **variables: Any) -> str:
    return template().render(messages=messages, **variables)


def prompt(messages: list[chat.Message], **variables: Any) -> str:
    return render(messages, add_generation_prompt=True, **variables)


def test_the_shipped_files_hold_this_template() -> None:
    assert (MODEL / "chat_template.jinja").read_text() == chat.template()
    assert json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"] == chat.template()


def test_template_and_corpus_agree() -> None:
    rng = Random(2)
    for _ in range(300):
        task = corpus.conversation(rng)
        expected = chat.prompt_text(task.messages, task.tools, task.thinking)
        assert prompt(task.messages, tools=task.tools, enable_thinking=task.thinking) == expected


def test_template_and_corpus_agree_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    rng = Random(4)
    for _ in range(100):
        task = corpus.conversation(rng)
        expected = chat.prompt_text(task.messages, task.tools, task.thinking)
        rendered = tokenizer.apply_chat_template(
            task.messages,
            tools=task.tools,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=task.thinking,
        )
        assert rendered == expected


def test_thinking_is_off_unless_asked_for() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert prompt(messages).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt(messages, enable_thinking=True).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
    ],
)
def test_earlier_thoughts_are_dropped(answer: chat.Message) -> None:
    question = {"role": "user", "content": "Hi"}
    assert "<|im_start|>assistant\nHello<|im_end|>" in prompt([question, answer, question], enable_thinking=True)
    assert "<think>\nhm\n</think>\n\nHello<|im_end|>" in render([question, answer])


def test_structured_calls_and_their_text_look_the_same() -> None:
    question = {"role": "user", "content": "What time is it?"}
    result = {"role": "tool", "content": '{"time": "12:00"}'}
    text = {"role": "assistant", "content": chat.tool_call(CALL["name"], CALL["arguments"])}
    written = prompt([question, text, result])
    for arguments in (CALL["arguments"], json.dumps(CALL["arguments"], ensure_ascii=False)):
        function = {"type": "function", "function": {"name": CALL["name"], "arguments": arguments}}
        structured = {"role": "assistant", "content": None, "tool_calls": [function]}
        assert prompt([question, structured, result]) == written
    assert written == chat.prompt_text([question, text, result])


def test_parallel_results_share_a_turn() -> None:
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    one, two = ("<tool_response>\n" + digit + "\n</tool_response>" for digit in "12")
    assert render(results) == f"<|im_start|>user\n{one}\n{two}<|im_end|>\n"


def test_a_plain_tojson_does_not_escape_the_markup() -> None:
    """Jinja's own `tojson` returns markup-safe text, which must not turn its neighbours into entities."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    environment = ImmutableSandboxedEnvironment()
    text = environment.from_string(chat.template()).render(
        messages=[{"role": "assistant", "content": "", "tool_calls": [CALL]}], tools=tools
    )
    assert "&lt;" not in text
    assert "<tools>\n{" in text
    assert '<tool_call>\n{"name": "get_time", "arguments": {' in text
