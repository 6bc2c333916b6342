"""Plans of replies: what the engine is told, what the parsers are given, and which formats a model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.resolve import DEMO_MODEL, resolve
from quire.foundation.errors import ConfigError, InputError
from quire.frontend.replies import Reply, ReplyPlan, ReplyWish
from quire.frontend.reply_formats import Formats, find_formats
from quire.frontend.tokenization.tokenizer import load_tokenizer
from quire.parsers.base import REASONING_FORMATS, TOOL_FORMATS
from quire.scheduling.constraint import ConstraintState, Phase
from quire.types.reply import NamedTool, Tool, ToolCall
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSpec
from tests.scheduling.toy_grammar import ToyGrammar, ToyMatcher

START, END, END_BEFORE_CALLS = (3,), (4, 5), (4, 6)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LOOSE = [Tool("f", parameters=SCHEMA), Tool("g")]
STRICT = [Tool("f", parameters=SCHEMA, strict=True), Tool("g")]
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))


def formats(reasoning: str | None = "qwen3", tools: str | None = "hermes", **options: Any) -> Formats:
    return Formats(
        tools=None if tools is None else TOOL_FORMATS.get(tools),
        reasoning=None if reasoning is None else REASONING_FORMATS.get(reasoning),
        **({"start": START, "end": END, "end_before_calls": END} | options if reasoning else {}),
    )


def plan(found: Formats, prompt: str = "<|im_start|>assistant\n", **wish: Any) -> ReplyPlan:
    return ReplyPlan(found, ReplyWish(**wish), prompt)


def test_plain_answers_need_nothing() -> None:
    for found, wish in (
        (Formats(), {}),
        (Formats(), {"tools": LOOSE}),
        (formats(reasoning=None), {"tools": LOOSE, "tool_choice": "none"}),
        (formats(reasoning=None), {}),
    ):
        made = plan(found, **wish)
        assert made.is_plain
        assert made.constraint is None
        params = SamplingParams()
        assert made.params(params) is params


@pytest.mark.parametrize(
    ("prompt", "kwargs", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", {}, "open"),
        ("<|im_start|>assistant\n<think>\n", {"enable_thinking": False}, "open"),  # the template has its own mind
        ("<|im_start|>assistant\n", {}, "maybe"),
        ("<|im_start|>assistant\n", {"enable_thinking": True}, "maybe"),
        ("<|im_start|>assistant\n", {"enable_thinking": False}, None),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", {}, None),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", {"enable_thinking": True}, None),
    ],
)
def test_a_grammar_binds_what_follows_the_reasoning(prompt: str, kwargs: dict[str, Any], state: str | None) -> None:
    constraint = ReplyPlan(formats(), ReplyWish(grammar=JSON, close_at_limit=True), prompt, kwargs).constraint
    assert constraint is not None
    assert constraint.grammar == JSON
    assert constraint.close_at_limit
    thinking = constraint.thinking
    assert (thinking and thinking.state) == state
    if thinking:
        assert (thinking.start, thinking.end, thinking.max_tokens) == ([3], [4, 5], None)


def test_a_budget_alone_binds_the_reasoning_alone() -> None:
    constraint = plan(formats(), max_thinking_tokens=0).constraint
    assert constraint is not None
    assert constraint.grammar is None
    assert constraint.thinking is not None
    assert constraint.thinking.max_tokens == 0
    with pytest.raises(InputError, match="reasoning_parser") as caught:
        plan(Formats(), max_thinking_tokens=5)
    assert caught.value.param == "max_thinking_tokens"


@pytest.mark.parametrize("choice", ["required", NamedTool("f")])
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls(choice: Any, parallel: bool) -> None:
    """In the model's own format if it has a grammar, else as a list. No other grammar has a say."""
    own = plan(formats(), tools=LOOSE, tool_choice=choice, parallel_tool_calls=parallel, grammar=JSON).constraint
    assert own is not None
    assert own.grammar is not None
    assert own.grammar.kind == "structural_tag"
    assert own.grammar.text.count("<tool_call>") == (2 if choice == "required" else 1)
    as_list = plan(Formats(), tools=LOOSE, tool_choice=choice, parallel_tool_calls=parallel).constraint
    assert as_list is not None
    assert as_list.grammar is not None
    schema = json.loads(as_list.grammar.text)
    names = [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]]
    assert names == (["f", "g"] if choice == "required" else ["f"])
    assert ("maxItems" in schema) == (not parallel or choice != "required")


def test_calls_that_are_free_to_come() -> None:
    assert plan(formats(reasoning=None), tools=LOOSE).constraint is None
    strict = plan(formats(reasoning=None), tools=STRICT).constraint
    assert strict is not None
    assert strict.grammar is not None
    assert json.loads(strict.grammar.text)["format"]["type"] == "triggered_tags"
    both = plan(formats(reasoning=None), tools=LOOSE, grammar=JSON).constraint
    assert both is not None
    assert both.grammar is not None
    content, calls = json.loads(both.grammar.text)["elements"]
    assert content["json_schema"] == SCHEMA
    assert "<tool_call>" in json.dumps(calls)
    unknown = plan(Formats(), tools=LOOSE, grammar=JSON).constraint
    assert unknown is not None
    assert unknown.grammar == JSON


def test_reasoning_that_ends_otherwise_before_a_call() -> None:
    found = formats("openai_gptoss", "openai", end_before_calls=END_BEFORE_CALLS)
    for wish, end, state in (
        ({"tools": LOOSE, "tool_choice": "required"}, END_BEFORE_CALLS, "maybe"),
        ({"tools": LOOSE, "tool_choice": "required", "grammar": JSON}, END_BEFORE_CALLS, "maybe"),
        ({"tools": LOOSE, "grammar": JSON}, END, "open"),
        ({"grammar": JSON}, END, "open"),
    ):
        constraint = plan(found, "<|start|>assistant", **wish).constraint
        assert constraint is not None
        assert constraint.thinking is not None
        assert (tuple(constraint.thinking.end), constraint.thinking.state) == (end, state)


def test_special_tokens_stay_if_a_parser_needs_them() -> None:
    params = SamplingParams()
    assert plan(formats(), tools=LOOSE).params(params).skip_special_tokens is False
    assert plan(formats(tools=None)).params(params) is params
    assert plan(formats(tools=None, special_reasoning=True)).params(params).skip_special_tokens is False
    off = ReplyPlan(formats(special_reasoning=True), ReplyWish(), "", {"enable_thinking": False})
    assert off.params(params) is params


def test_reasoning_tokens_are_counted_to_the_end_of_their_marker() -> None:
    opened, maybe = plan(formats(), "<think>"), plan(formats())
    assert opened.count_reasoning([9, 4, 9, 4, 5, 9, 9]) == 5
    assert opened.count_reasoning([9, 4]) == 2  # cut
    assert maybe.count_reasoning([3, 9, 4, 5, 9]) == 4
    assert maybe.count_reasoning([9, 9]) == 0
    assert plan(Formats()).count_reasoning([3, 9, 4, 5]) == 0
    header = plan(formats("openai_gptoss", end=(4, 5, 6), end_seam=2, end_before_calls=(7,)), "<|start|>assistant")
    assert header.count_reasoning([9, 4, 5, 1, 1, 6, 9]) == 6


def test_a_reply_is_the_sum_of_its_pieces_and_a_named_call_is_no_reason() -> None:
    text = 'Hm.</think>ok\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for wish, reason in (({}, "tool_calls"), ({"tool_choice": NamedTool("f")}, "stop")):
        parser = plan(formats(), "<think>", tools=LOOSE, **wish).parser()
        reply = Reply().add(parser.feed(text)).add(parser.finish())
        assert (reply.reasoning, reply.content) == ("Hm.", "ok")
        assert reply.tool_calls == [ToolCall(reply.tool_calls[0].id, "f", '{"a": 1}')]
        assert parser.finish_reason("stop") == reason
        assert parser.finish_reason("length") == "length"


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"', "stop"),
        (
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {',
            "stop",
        ),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> and', "tool_calls"),
    ],
)
def test_a_stop_string_amid_a_call_is_no_end_by_calls(text: str, reason: str) -> None:
    parser = plan(formats(reasoning=None), tools=LOOSE).parser()
    reply = Reply().add(parser.feed(text)).add(parser.finish(is_cut=True))
    assert reply.tool_calls[0].name == "f"
    assert parser.finish_reason("stop") == reason


# Which formats a model has


def found_with(**options: Any) -> Formats:
    resolved = resolve(EngineConfig.from_flat(**options))
    return find_formats(resolved, load_tokenizer(resolved))


def test_a_harmony_header_may_say_more_than_its_channel(tmp_path: Path) -> None:
    """`<|channel|>final <|constrain|>json<|message|>`: the grammar binds what follows."""
    file = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    for name in ("<|channel|>", "<|message|>", "<|constrain|>"):
        token = {"id": len(file["model"]["vocab"]), "content": name, "special": True}
        file["model"]["vocab"][name] = token["id"]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        file["added_tokens"].append(token | flags)
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    resolved = resolve(EngineConfig.from_flat(tokenizer=str(tmp_path), reasoning_parser="openai_gptoss"))
    tokenizer = load_tokenizer(resolved)
    assert tokenizer is not None
    constraint = plan(find_formats(resolved, tokenizer), "<|start|>assistant", grammar=JSON).constraint
    assert constraint is not None
    for header in ("final", "final <|constrain|>json", "final json"):
        state = ConstraintState(constraint, lambda: ToyMatcher(ToyGrammar(5)), 5000)
        text = f"<|channel|>analysis<|message|>Hm, final.<|channel|>{header}<|message|>"
        phases = []
        for token in tokenizer.encode(text, add_special_tokens=False):
            phases.append(state.phase)
            state.advance(token)
        assert set(phases) == {Phase.THINKING}, header
        assert state.phase is Phase.GRAMMAR, header


def test_formats_are_told_by_the_template_or_named() -> None:
    demo = found_with()
    assert demo.tools is TOOL_FORMATS.get("hermes")
    assert demo.reasoning is REASONING_FORMATS.get("qwen3")
    assert (demo.start, demo.end, demo.special_reasoning) == ((3,), (4,), False)
    named = found_with(tool_call_parser="kimi_k2", reasoning_parser="mistral")
    assert named.tools is TOOL_FORMATS.get("kimi_k2")
    assert named.reasoning is REASONING_FORMATS.get("mistral")
    assert found_with(tool_call_parser="none", reasoning_parser="") == Formats()
    assert found_with(skip_tokenizer_init=True) == Formats()


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_unknown_names_are_refused_with_the_known_ones(option: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen3.*known: .*granite"):
        found_with(**{option: "qwen3_"})


def test_a_plugin_file_registers_formats_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (TOOL_FORMATS, REASONING_FORMATS):
        monkeypatch.setattr(registry, "_targets", dict.fromkeys(registry) | registry._targets)
    file = tmp_path / "mine.py"
    file.write_text(
        "from quire.parsers.base import REASONING_FORMATS, TOOL_FORMATS\n"
        "TOOL_FORMATS.register('mine', TOOL_FORMATS.get('hermes'))\n"
        "REASONING_FORMATS.register('mine', REASONING_FORMATS.get('granite'))\n"
    )
    for _ in range(2):
        found = found_with(tool_parser_plugin=str(file), tool_call_parser="mine", reasoning_parser="mine")
        assert found.tools is TOOL_FORMATS.get("hermes")
        assert found.reasoning is REASONING_FORMATS.get("granite")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        found_with(reasoning_parser_plugin=str(broken))
    with pytest.raises(ConfigError, match="not a Python file"):
        found_with(reasoning_parser_plugin=str(tmp_path / "nowhere.py"))
    taken = tmp_path / "taken.py"
    taken.write_text("from quire.parsers.base import TOOL_FORMATS\nTOOL_FORMATS.register('hermes', None)\n")
    with pytest.raises(ConfigError, match="'hermes' is registered already"):
        found_with(tool_parser_plugin=str(taken))
