"""Answers with tool calls, made up in every tool format: what a model would write, and what it means.

The writers know the formats from the models' templates; they share nothing with the parsers.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.types.reply import Tool

Arguments = dict[str, Any]
Call = tuple[str, Arguments]
Write = Callable[[list[Call], random.Random], str]


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` as the model writes it; content and calls are what it means."""

    text: str
    content: list[str]  # one after the other, with or without space between
    calls: list[Call]
    tools: list[Tool]


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How one format writes the calls that follow each other."""

    calls: Write
    markers: tuple[str, ...]  # some of them stand in strings, and their beginnings in content
    max_calls: int = 3
    is_typed: bool = False  # strings are bare, so null is told from a string by the schema
    forbidden: tuple[str, ...] = ()  # what no string can hold in this format
    id_pattern: str = r"chatcmpl-tool-[0-9a-f]{16}"
    has_text: bool = True  # content may stand around calls
    flat_keys: bool = False  # keys inside objects are plain words


def dump(value: object, rng: random.Random) -> str:
    """As one of the ways in which models write JSON."""
    return json.dumps(
        value,
        ensure_ascii=rng.random() < 0.3,
        indent=rng.choice((None, None, None, 2)),
        separators=rng.choice((None, None, (",", ":"))),
    )


# --- formats ------------------------------------------------------------------------------------------------------


def json_object(name_key: str, argument_key: str, call: Call, rng: random.Random, *, any_order: bool = True) -> str:
    name, arguments = call
    items: list[tuple[str, object]] = [(name_key, name), (argument_key, arguments)]
    if any_order and rng.random() < 0.2:
        items.reverse()
    if any_order and rng.random() < 0.1:
        items.insert(rng.randrange(3), ("id", "x{1}"))
    return dump(dict(items), rng)


def objects(before: str, after: str, argument_key: str = "arguments", joint: str = "\n") -> Write:
    def write(calls: list[Call], rng: random.Random) -> str:
        return joint.join(before + json_object("name", argument_key, call, rng) + after for call in calls)

    return write


def json_list(before: str, after: str, name_key: str = "name", argument_key: str = "arguments") -> Write:
    def write(calls: list[Call], rng: random.Random) -> str:
        joint = rng.choice((", ", ",", ",\n"))
        return before + "[" + joint.join(json_object(name_key, argument_key, call, rng) for call in calls) + "]" + after

    return write


def apertus(calls: list[Call], rng: random.Random) -> str:
    return "<|tools_prefix|>[" + ", ".join(dump({name: a}, rng) for name, a in calls) + "]<|tools_suffix|>"


def deepseek_v3(calls: list[Call], rng: random.Random) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dump(arguments, rng)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call], rng: random.Random) -> str:
    written = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dump(a, rng)}<｜tool▁call▁end｜>" for name, a in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: list[Call], rng: random.Random) -> str:
    word = rng.choice(("calls", "calls", "call"))
    start = rng.randrange(100_000)
    between, end = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    written = (
        f"<|tool_call_begin|>functions.{name}:{start + index}{between}{dump(arguments, rng)}{end}"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_{word}_section_begin|>" + "".join(written) + f"<|tool_{word}_section_end|>"


def mistral(calls: list[Call], rng: random.Random) -> str:
    if rng.random() < 0.3:
        return json_list("[TOOL_CALLS]", "")(calls, rng)
    return "".join(f"[TOOL_CALLS]{name}{rng.choice(('[ARGS]', ''))}{dump(a, rng)}" for name, a in calls)


def bare(value: object, rng: random.Random) -> str:
    """As templates write an argument: strings as they are, all else as JSON."""
    if isinstance(value, str):
        return value
    if rng.random() < 0.2:
        return str(value)  # as templates that forget to ask for JSON
    return json.dumps(value, ensure_ascii=False)


def tagged(
    section: tuple[str, str], call: tuple[str, str, str], argument: tuple[str, str, str], line: str = "\n"
) -> Write:
    def write(calls: list[Call], rng: random.Random) -> str:
        written = []
        for name, arguments in calls:
            inside = "".join(
                argument[0] + key + argument[1] + bare(value, rng) + argument[2] + line
                for key, value in arguments.items()
            )
            written.append(call[0] + name + call[1] + line + inside + call[2])
        return section[0] + line.join(written) + section[1]

    return write


def qwen(opening: str, closing: str, padding: str = "\n") -> Write:
    argument = ("<parameter=", f">{padding}", f"{padding}</parameter>")
    inner = tagged(("", ""), ("<function=", ">", "</function>"), argument)

    def write(calls: list[Call], rng: random.Random) -> str:
        return "\n".join(f"{opening}\n{inner([call], rng)}\n{closing}" for call in calls)

    return write


def dsml(word: str) -> Write:
    def write(calls: list[Call], _rng: random.Random) -> str:
        written = []
        for name, arguments in calls:
            lines = [f'<｜DSML｜invoke name="{name}">']
            for key, value in arguments.items():
                is_string = isinstance(value, str)
                text = value if is_string else json.dumps(value)
                kind = "true" if is_string else "false"
                lines.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>')
            written.append("\n".join([*lines, "</｜DSML｜invoke>"]))
        return f"<｜DSML｜{word}>\n" + "\n".join(written) + f"\n</｜DSML｜{word}>"

    return write


def step3(calls: list[Call], rng: random.Random) -> str:
    argument = ('<steptml:parameter name="', '">', "</steptml:parameter>")
    inner = tagged(("", ""), ('<steptml:invoke name="', '">', "</steptml:invoke>"), argument, "")
    written = (f"<｜tool_call_begin｜>function<｜tool_sep｜>{inner([call], rng)}<｜tool_call_end｜>" for call in calls)
    return "<｜tool_calls_begin｜>" + "".join(written) + "<｜tool_calls_end｜>"


def glm(calls: list[Call], rng: random.Random) -> str:
    line = rng.choice(("\n", ""))
    written = []
    for name, arguments in calls:
        inside = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{bare(value, rng)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}{line}{inside}</tool_call>")
    return line.join(written)


def hy_v3(calls: list[Call], rng: random.Random) -> str:
    end = rng.choice(("", ":x1", "_7f"))
    written = []
    for name, arguments in calls:
        inside = "".join(
            f"<arg_key{end}>{key}</arg_key{end}>\n<arg_value{end}>{bare(value, rng)}</arg_value{end}>\n"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call{end}>{name}<tool_sep{end}>\n{inside}</tool_call{end}>\n")
    return f"<tool_calls{end}>\n" + "".join(written) + f"</tool_calls{end}>"


def python_call(call: Call, *, escapes: bool = True) -> str:
    """escapes: False writes plain strings between apostrophes, whatever is in them, as LFM2's template does."""
    name, arguments = call
    written = []
    for key, value in arguments.items():
        is_plain = isinstance(value, str) and not re.search(r"[\\\n\t]|'\s*[],):}]|'$", value)
        written.append(f"{key}='{value}'" if is_plain and not escapes else f"{key}={value!r}")
    return f"{name}({', '.join(written)})"


def python_list(before: str, after: str) -> Write:
    def write(calls: list[Call], rng: random.Random) -> str:
        escapes = rng.random() < 0.7
        return f"{before}[{', '.join(python_call(call, escapes=escapes) for call in calls)}]{after}"

    return write


def olmo3(calls: list[Call], rng: random.Random) -> str:
    def words(call: Call) -> str:
        name, arguments = call
        return f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"

    write = rng.choice((words, python_call))
    return "<function_calls>\n" + "\n".join(map(write, calls)) + "\n</function_calls>"


def gemma(before: str, after: str, quote: str) -> Write:
    def value(one: object) -> str:
        if isinstance(one, str):
            return quote + one + quote
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ",".join(map(value, one)) + "]"
        return json.dumps(one)

    def write(calls: list[Call], _rng: random.Random) -> str:
        return "".join(f"{before}call:{name}{value(arguments)}{after}" for name, arguments in calls)

    return write


def minimax_m3(calls: list[Call], rng: random.Random) -> str:
    prefix = "]<]minimax[>["

    def element(key: str, one: object) -> str:
        return f"{prefix}<{key}>{value(one)}{prefix}</{key}>"

    def value(one: object) -> str:
        if isinstance(one, dict):
            return "".join(element(key, inner) for key, inner in one.items())
        if isinstance(one, list):
            return "".join(element("item", inner) for inner in one)
        return bare(one, rng)

    written = (f'{prefix}<invoke name="{name}">{value(arguments)}{prefix}</invoke>\n' for name, arguments in calls)
    return f"{prefix}<tool_call>\n{''.join(written)}{prefix}</tool_call>"


def harmony(calls: list[Call], rng: random.Random) -> str:
    written = []
    for name, arguments in calls:
        head = rng.choice(
            (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                f" to=functions.{name}<|channel|>commentary json<|message|>",
            )
        )
        written.append(f"<|start|>assistant{head}{json.dumps(arguments)}<|call|>")
    return "".join(written)


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_ARG_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_QWEN = ("<tool_call>", "<function=", "</parameter>", "</function>", "</tool_call>")
_DSML = ("<｜DSML｜invoke", "</｜DSML｜parameter>", "</｜DSML｜invoke>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_GLM = Writer(calls=glm, markers=_ARG_TAGS, is_typed=True)
_HERMES = Writer(calls=objects("<tool_call>\n", "\n</tool_call>"), markers=_TOOL_CALL)
_LLAMA = Writer(calls=objects("", "", "parameters", "; "), markers=("<|python_tag|>",), has_text=False)
_COHERE = json_list("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")
_QWEN3_CODER = Writer(calls=qwen("<tool_call>", "</tool_call>"), markers=_QWEN, is_typed=True)

WRITERS: dict[str, Writer] = {
    "apertus": Writer(calls=apertus, markers=("<|tools_prefix|>", "<|tools_suffix|>")),
    "cohere_command3": Writer(calls=_COHERE, markers=("<|START_ACTION|>", "<|END_ACTION|>")),
    "cohere_command4": Writer(calls=_COHERE, markers=("<|START_ACTION|>", "<|END_ACTION|>")),
    "deepseek_v3": Writer(calls=deepseek_v3, markers=(*_DEEPSEEK, "\n```")),
    "deepseek_v31": Writer(calls=deepseek_v31, markers=_DEEPSEEK),
    "deepseek_v32": Writer(calls=dsml("function_calls"), markers=("<｜DSML｜function_calls>", *_DSML)),
    "deepseek_v4": Writer(calls=dsml("tool_calls"), markers=("<｜DSML｜tool_calls>", *_DSML)),
    "ernie45": _HERMES,
    "functiongemma": Writer(
        calls=gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        markers=("<start_function_call>", "<end_function_call>", "}"),
        forbidden=("<escape>",),
        flat_keys=True,
    ),
    "gemma4": Writer(
        calls=gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        markers=("<|tool_call>", "<tool_call|>", "}"),
        forbidden=('<|"|>',),
        flat_keys=True,
    ),
    "gigachat3": Writer(
        calls=objects("function call<|role_sep|>\n", ""), markers=("function call<|role_sep|>", "<|function_call|>")
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": Writer(calls=json_list("<|tool_call|>", ""), markers=("<|tool_call|>", "<tool_call>")),
    "granite-20b-fc": Writer(calls=objects("<function_call> ", ""), markers=("<function_call>",)),
    "granite4": Writer(calls=objects("<tool_call>", "</tool_call>"), markers=_TOOL_CALL),
    "hermes": _HERMES,
    "hunyuan_a13b": Writer(calls=json_list("<tool_calls>", "</tool_calls>"), markers=("<tool_calls>",)),
    "hy_v3": Writer(calls=hy_v3, markers=("<tool_calls>", *_ARG_TAGS), is_typed=True),
    "inkling": Writer(
        calls=objects("<|message_model|><|content_invoke_tool_json|>", "<|end_message|>", "args", ""),
        markers=("<|content_invoke_tool_json|>", "<|end_message|>"),
    ),
    "internlm": Writer(
        calls=objects("<|action_start|><|plugin|>", "<|action_end|>", "parameters"),
        markers=("<|action_start|>", "<|action_end|>"),
        max_calls=1,
    ),
    "jamba": Writer(calls=json_list("<tool_calls>", "</tool_calls>"), markers=("<tool_calls>", "</tool_calls>")),
    "kimi_k2": Writer(
        calls=kimi_k2,
        markers=("<|tool_calls_section_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        id_pattern=r"functions\.[A-Za-z0-9_]+:[0-9]+",
    ),
    "lfm2": Writer(
        calls=python_list("<|tool_call_start|>", "<|tool_call_end|>"),
        markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": Writer(
        calls=python_list("<|python_start|>", "<|python_end|>"), markers=("<|python_start|>", "<|python_end|>", "[")
    ),
    "longcat": Writer(
        calls=objects("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        markers=("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    "mimo": _QWEN3_CODER,
    "minicpm5": Writer(
        calls=tagged(("", ""), ('<function name="', '">', "</function>"), ('<param name="', '">', "</param>"), ""),
        markers=("<function", "</param>", "</function>"),
        is_typed=True,
    ),
    "minimax_m2": Writer(
        calls=tagged(
            ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
            ('<invoke name="', '">', "</invoke>"),
            ('<parameter name="', '">', "</parameter>"),
        ),
        markers=("<minimax:tool_call>", "<invoke", "</parameter>", "</invoke>"),
        is_typed=True,
    ),
    "minimax_m3": Writer(
        calls=minimax_m3,
        markers=("<tool_call>", "</invoke>", "]<]mini"),
        forbidden=("]<]minimax[>[",),
        is_typed=True,
        flat_keys=True,
    ),
    "mistral": Writer(calls=mistral, markers=("[TOOL_CALLS]", "[ARGS]"), id_pattern=r"[A-Za-z0-9]{9}"),
    "olmo3": Writer(calls=olmo3, markers=("<function_calls>", "</function_calls>")),
    "openai": Writer(calls=harmony, markers=("<|start|>", "<|call|>", "<|channel|>")),
    "phi4_mini_json": Writer(calls=json_list("functools", ""), markers=("functools[",)),
    "poolside_v1": _GLM,
    "pythonic": Writer(calls=python_list("", ""), markers=("[",), has_text=False),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": Writer(
        calls=qwen("<seed:tool_call>", "</seed:tool_call>", padding=""),
        markers=("<seed:tool_call>", *_QWEN[1:4]),
        is_typed=True,
    ),
    "step3": Writer(
        calls=step3, markers=("<｜tool_calls_begin｜>", "</steptml:parameter>", "</steptml:invoke>"), is_typed=True
    ),
    "step3p5": _QWEN3_CODER,
    "xlam": Writer(
        calls=lambda calls, rng: json_list(
            *rng.choice((("", ""), ("```json\n", "\n```"), ("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>")))
        )(calls, rng),
        markers=("[", "[TOOL_CALLS]", "```json"),
        has_text=False,
    ),
}


# --- tools, values, text ------------------------------------------------------------------------------------------

_WORDS = (
    "where",
    "Ünïcode",
    "naïve",
    "日本語",
    "😀",
    "it's",
    'a "quote"',
    "back\\slash",
    "{brace}",
    "[1]",
    "a, b",
    "x=1",
)
_WORDS += ("</b>", "<i>", "\ttab", "line\nbreak", "5 < 6", "a}b", "]", "C:\\new\\u0041", "null", "&amp;", "\\", '"}')
_PLAIN_TYPES = ("string", "string", "string", "integer", "number", "boolean", "array", "object")


@dataclass
class _Maker:
    rng: random.Random
    writer: Writer
    strings: list[str] = field(default_factory=list)

    def word(self) -> str:
        return self.rng.choice(string.ascii_letters) + "".join(
            self.rng.choices(string.ascii_lowercase + "_", k=self.rng.randrange(1, 8))
        )

    def text(self) -> str:
        """A string argument, at times with markers of the format inside."""
        words = self.rng.choices(_WORDS, k=self.rng.randrange(4))
        if self.rng.random() < 0.25:
            # Behind a marker something that cannot follow it in a call.
            words.insert(self.rng.randrange(len(words) + 1), self.rng.choice(self.writer.markers) + " ~")
        text = self.rng.choice(("", " ", "\n")).join(words)
        return text if not any(part in text for part in self.writer.forbidden) else "plain"

    def schema(self, depth: int = 0) -> dict[str, Any]:
        kind = self.rng.choice(_PLAIN_TYPES if depth < 2 else _PLAIN_TYPES[:6])
        if kind == "array":
            return {"type": "array", "items": self.schema(depth + 1)}
        if kind == "object":
            keys = [self.word() for _ in range(self.rng.randrange(1, 4))]
            return {"type": "object", "properties": {key: self.schema(depth + 1) for key in keys}}
        if depth == 0 and self.rng.random() < 0.15:
            return {"anyOf": [{"type": kind}, {"type": "null"}]}
        return {"type": kind}

    def value(self, schema: dict[str, Any]) -> Any:
        rng = self.rng
        if "anyOf" in schema:
            value = self.value(rng.choice(schema["anyOf"]))
            # Bare text cannot tell these.
            return "text" if isinstance(value, str) and value.strip().lower() in ("null", "none") else value
        match schema["type"]:
            case "string":
                return self.text()
            case "integer":
                return rng.choice((0, -1, 7, 10**12, rng.randrange(-(10**6), 10**6)))
            case "number":
                return rng.choice((0.5, -2.25, 1e-7, 3, 1.5e300, rng.uniform(-1000, 1000)))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case "array":
                return [self.value(schema["items"]) for _ in range(rng.randrange(4))]
        keys = [key for key in schema["properties"] if rng.random() < 0.8]
        return {key: self.value(schema["properties"][key]) for key in keys}

    def tool(self) -> Tool:
        keys = [self.word() for _ in range(self.rng.randrange(5))]
        return Tool(
            name="f_" + self.word(),
            parameters={"type": "object", "properties": {key: self.schema() for key in keys}},
        )

    def content(self) -> str:
        """Text that is no call, at times with the beginning of a marker in it."""
        words = [self.word() for _ in range(self.rng.randrange(1, 6))]
        if self.rng.random() < 0.4:
            marker = self.rng.choice(self.writer.markers)
            words.insert(
                self.rng.randrange(1, len(words) + 1), marker[: self.rng.randrange(1, max(len(marker), 2))] + " ~"
            )
        return self.rng.choice((" ", "  ", "\n")).join([*words, "end."])


def make(name: str, rng: random.Random) -> Answer:
    """An answer in the format `name` with at least one call."""
    writer = WRITERS[name]
    maker = _Maker(rng, writer)
    tools = [maker.tool() for _ in range(rng.randrange(1, 4))]
    text = ""
    content: list[str] = []
    calls: list[Call] = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        if writer.has_text and rng.random() < 0.6:
            part = maker.content()
            space = rng.choice(("", "\n", "\n\n", " "))
            text += part + space
            content.append(part)
        group = []
        for _ in range(rng.randrange(1, writer.max_calls + 1)):
            tool = rng.choice(tools)
            properties: dict[str, Any] = (tool.parameters or {})["properties"]  # type: ignore[assignment]
            group.append((tool.name, {k: maker.value(s) for k, s in properties.items() if rng.random() < 0.85}))
        text += writer.calls(group, rng) + rng.choice(("", "\n"))
        calls += group
        if not writer.has_text:
            break
    if writer.has_text and rng.random() < 0.3:
        part = maker.content()
        text += "\n" + part
        content.append(part)
    return Answer(text, content, calls, tools)
