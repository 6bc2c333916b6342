"""The chat format, twice: as the Jinja template users get, and as plain Python fast enough to train with.

`tests/demo/test_chat.py` holds the two to the same text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Message = dict[str, Any]
Tool = dict[str, Any]

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NO_THOUGHT = "<think>\n\n</think>\n\n"

TOOL_INTRO = "You can call these functions. Each line describes one of them as JSON.\n<tools>\n"
TOOL_OUTRO = (
    "</tools>\n"
    "To call one, answer with its name and its arguments between tags, and nothing else:\n"
    '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "If none of them fits, answer without calling any."
)

TEMPLATE = r"""
{#- Quire demo chat format: ChatML turns, Hermes-style tool calls, thinking off unless asked for. -#}
{%- set thinking = enable_thinking is defined and enable_thinking -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set last.user = last.user + 1 -%}{%- endfor -%}
{%- set seen = namespace(user=-1) -%}
{%- set opening = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if opening -%}{{- (messages[0].content or '') + '\n\n' -}}{%- endif -%}
    {{- TOOL_INTRO -}}
    {%- for tool in tools -%}{{- tool | tojson -}}{{- '\n' -}}{%- endfor -%}
    {{- TOOL_OUTRO -}}
    {{- '<|im_end|>\n' -}}
{%- elif opening -%}
    {{- '<|im_start|>system\n' + (messages[0].content or '') + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content or '' -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- set thought = message.reasoning_content or '' -%}
        {%- if not thought and '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() -%}
        {%- endif -%}
        {%- set content = content.split('</think>')[-1].lstrip('\n') if '</think>' in content else content -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if thought and seen.user == last.user -%}
            {{- '<think>\n' + thought + '\n</think>\n\n' -}}
        {%- endif -%}
        {{- content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {%- if content or not loop.first -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif not (message.role == 'system' and loop.first) -%}
        {%- if message.role == 'user' -%}{%- set seen.user = seen.user + 1 -%}{%- endif -%}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if not thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""


def template() -> str:
    """The Jinja chat template, with the tool instructions filled in as string literals."""

    def literal(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"

    filled = TEMPLATE.replace("TOOL_INTRO", literal(TOOL_INTRO)).replace("TOOL_OUTRO", literal(TOOL_OUTRO))
    return filled.strip() + "\n"


class Segment(NamedTuple):
    """A run of text and the part it plays in training: read, written earlier, or to be written now."""

    text: str
    role: Literal["prompt", "history", "answer"]


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The text of one call, as the model must write it."""
    payload = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{payload}\n</tool_call>"


def _system(messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
    text = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if tools:
        listing = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        text = (f"{text}\n\n" if text is not None else "") + TOOL_INTRO + listing + TOOL_OUTRO
    return "" if text is None else f"{IM_START}system\n{text}{IM_END}\n"


def render(messages: Sequence[Message], tools: Sequence[Tool] | None = None, thinking: bool = False) -> list[Segment]:
    """The prompt for the next answer, cut into segments. Tool calls are expected as text in `content`."""
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    segments = [Segment(_system(messages, tools), "prompt")]
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "assistant":
            thought = message.get("reasoning_content", "") if i > last_user else ""
            opening = f"{IM_START}assistant\n"
            segments.append(Segment(opening + (f"<think>\n{thought}\n</think>\n\n" if thought else ""), "prompt"))
            segments += [Segment(content + IM_END, "history"), Segment("\n", "prompt")]
        elif role == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            segments.append(Segment(f"{IM_START}user\n{text}{IM_END}\n", "prompt"))
        elif role != "system" or i > 0:
            segments.append(Segment(f"{IM_START}{role}\n{content}{IM_END}\n", "prompt"))
    segments.append(Segment(f"{IM_START}assistant\n" + ("" if thinking else NO_THOUGHT), "prompt"))
    return segments


def answer_segment(answer: str, thought: str, thinking: bool) -> Segment:
    """What the model has to write after `render`, end marker included."""
    return Segment((f"<think>\n{thought}\n</think>\n\n" if thinking else "") + answer + IM_END, "answer")


def prompt_text(messages: Sequence[Message], tools: Sequence[Tool] | None = None, thinking: bool = False) -> str:
    return "".join(segment.text for segment in render(messages, tools, thinking))
