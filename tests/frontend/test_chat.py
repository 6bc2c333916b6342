"""Chat templates: the same text as transformers, clear errors, limits."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.foundation.errors import ConfigError, InputError
from quire.frontend.templates import limits as template_limits
from quire.frontend.templates.chat import ChatTemplate, normalize, render
from quire.frontend.templates.message_forms import MessageForms
from quire.frontend.templates.template import Template
from quire.frontend.tokenization.tokenizer import Tokenizer
from tests.frontend.tokenizers_for_tests import byte_level, save_folder

# Written for these tests in the manner of well-known families.

CHATML_STYLE = """
{%- if messages[0].role != 'system' %}{{ '<|start|>system\\nBe helpful.<|end|>\\n' }}{% endif %}
{%- if tools %}
    {{- '<|start|>tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|start|>assistant' }}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool call>' }}{{ {'name': call.name, 'arguments': call.arguments} | tojson }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|start|>user' }}{% endif %}
        {{- '\\n<response>' + message.content + '</response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\\n' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant\\n' }}{% generation %}{{ message.content }}{{ '<|end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

LLAMA3_STYLE = """
{{- bos_token }}
{%- set ns = namespace(turns=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + strftime_now("%Y") + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {%- set ns.turns = ns.turns + 1 %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("only one tool call at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}<|eot|>" }}
    {%- else %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}{{ message.content | tojson }}{{ "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{{- "#" ~ ns.turns }}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}
"""

MISTRAL_STYLE = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] not in ["user", "assistant", "tool"] %}
        {%- continue %}
    {%- endif %}
    {%- if message["role"] == "user" and (loop.index0 % 2 == 1) %}
        {{- raise_exception("roles must alternate user/assistant/user/assistant/…") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

PARTS_STYLE = """
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- set content = message.content %}
    {%- if content is string %}{{ content }}{% else %}
    {%- for part in content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}
    {%- endif %}
{%- endfor %}
"""

PARTS = MessageForms(parts=True)
STYLES = {"chatml": CHATML_STYLE, "llama3": LLAMA3_STYLE, "mistral": MISTRAL_STYLE, "parts": PARTS_STYLE}
TOOLS = [{"type": "function", "function": {"name": "köchin", "parameters": {"a": ["<b>", None, 1.5], "ü": "'\""}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "ü": "<x> & 'y'"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello <b> & 'you' 世界 "}],
    "system": [{"role": "system", "content": " Sys. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": " B "},
        {"role": "user", "content": "C\n"},
    ],
    "tools": [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "3."},
    ],
}


@pytest.fixture(scope="module", params=STYLES)
def styled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = save_folder(
        tmp_path_factory.mktemp(request.param),
        byte_level(),
        bos_token="<|start|>",
        eos_token="<|end|>",
        chat_template=STYLES[request.param],
    )
    return Tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "tools"])
@pytest.mark.parametrize("add", [True, False], ids=["prompt", "no_prompt"])
@pytest.mark.parametrize("chat", CHATS)
def test_equal_to_transformers(styled: tuple[Tokenizer, Any], chat: str, add: bool, tools: Any) -> None:
    mine, theirs = styled
    options = {"tools": tools, "add_generation_prompt": add, "enable_thinking": False}
    expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, **options)
    assert mine.apply_chat_template(CHATS[chat], tokenize=False, **options) == expected
    assert mine.apply_chat_template(CHATS[chat], **options) == mine.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("final", ["Sure,", "Sure, here: ", " Sure\n\n"])
def test_continuing_equals_transformers(styled: tuple[Tokenizer, Any], final: str) -> None:
    mine, theirs = styled
    chat = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert mine.apply_chat_template(chat, tokenize=False, continue_final_message=True) == expected


def test_arguments_as_json_text_become_objects() -> None:
    as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "ü": "<x> & \'y\'"}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [as_text]}]
    assert normalize(chat)[1]["tool_calls"] == [CALL]
    assert chat[1]["tool_calls"][0]["function"]["arguments"].startswith("{"), "the caller's messages were changed"
    empty = {**CALL, "function": {"name": "add", "arguments": ""}}
    assert normalize([{"role": "assistant", "tool_calls": [empty]}])[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_arguments_are_json_text_to_templates_that_write_them() -> None:
    """As DeepSeek's do. The text is the client's own; an object's is JSON, not Python."""
    begin = "{% for c in messages[0].tool_calls %}{% set a = c.function.arguments %}"
    for arguments, text in (('{"a":  1}', '{"a":  1}'), ({"ü": None}, '{"ü": null}'), ("", "{}")):
        call = {**CALL, "function": {"name": "add", "arguments": arguments}}
        chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert render(chat, template=begin + "{{ a }}|{{ '<' + a + '>' }}|{{ a ~ '>' }}{% endfor %}") == (
            f"{text}|<{text}>|{text}>"
        )
    assert render(chat, template=begin + "{{ a | tojson }}{{ a is string }}{{ a is mapping }}{% endfor %}") == (
        "{}FalseTrue"
    )


@pytest.mark.parametrize("content", [None, "", []])
def test_a_call_is_not_lost_in_templates_that_tell_it_by_content_that_is_none(content: Any) -> None:
    chat = [{"role": "assistant", "content": content, "tool_calls": [CALL]}, {"role": "user", "content": ""}]
    loop = "{% for m in messages %}"
    asking = loop + "{% if m['content'] is none %}call{% endif %}{% if m['content'] is not none %}text{% endif %}"
    aliased = loop + "{% set c = m.content %}{% if c is not none %}text{% else %}call{% endif %}"
    assert render(chat, template=asking + "{% endfor %}") == "calltext"
    assert render(chat, template=aliased + "{% endfor %}") == "calltext"
    assert render(chat, template=loop + "{{ '<' + m.content + '>' }}{% endfor %}") == "<><>"


def test_parts_are_joined_unless_the_template_reads_parts() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": content}]
    assert render(chat, template="{{ messages[0].content }}") == "a\nb"
    assert render(chat, template=PARTS_STYLE) == "<user>[a][b]"
    continued = [{"role": "assistant", "content": content}]
    assert render(continued, None, PARTS_STYLE, False, True) == "<assistant>[a][b"


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": "Hm.", "content": "a"},
        {"reasoning_content": "Hm.", "content": "a"},
        {"reasoning": None, "reasoning_content": "Hm.", "content": "a"},
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "a"}]},
    ],
)
def test_reasoning_of_earlier_answers_reaches_the_template_under_either_name(message: dict[str, Any]) -> None:
    chat = [{"role": "assistant", **message}]
    for name in ("reasoning", "reasoning_content", "thinking"):
        source = f"{{% for m in messages %}}{{{{ m.{name} }}}}: {{{{ m.content }}}}{{% endfor %}}"
        assert render(chat, template=source) == "Hm.: a"


def test_reasoning_beside_content_and_calls_is_no_thinking() -> None:
    """The template of gpt-oss takes a call's thinking or its content, and refuses both."""
    source = "{{ messages[0].thinking is defined }} {{ messages[0].reasoning }}"
    chat: dict[str, Any] = {"role": "assistant", "reasoning": "Hm.", "tool_calls": [CALL]}
    assert render([chat], template=source) == "True Hm."
    assert render([chat | {"content": "a"}], template=source) == "False Hm."
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}], "tool_calls": [CALL]}
    assert render([thought], template=source) == "True Hm."


def test_a_developer_is_the_system_to_templates_that_know_no_developer() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert render(chat, template="{{ messages[0].role }}") == "system"
    assert render(chat, template="{% if messages[0].role == 'developer' %}D{% endif %}") == "D"


@pytest.mark.parametrize(
    ("source", "forms"),
    [
        (CHATML_STYLE, MessageForms()),
        (PARTS_STYLE, PARTS),
        ("{% for p in messages[0]['content'] %}{% endfor %}", MessageForms(parts=True, text=False)),
        (
            "{% for m in messages %}{% for p in m.content if p.text %}{% endfor %}{% endfor %}",
            MessageForms(parts=True, text=False),
        ),
        ("{% set c = messages[0].content %}{% for p in c %}{% endfor %}", MessageForms(parts=True, text=False)),
        (
            "{% for p in messages[0].content | selectattr('type', 'equalto', 'text') %}{% endfor %}",
            MessageForms(parts=True, text=False),
        ),
        ("{% for p in messages[0].content if messages[0].content is not string %}{% endfor %}", PARTS),
        ("{% if messages[0]['content'] is not none %}{% endif %}", MessageForms(null=True)),
        ("{% for m in messages %}{% set tools = m.tools %}{{ tools }}{% endfor %}", MessageForms(tools=True)),
        ("{{ messages[0]['tools'] }}{{ tools }}", MessageForms()),
    ],
)
def test_what_templates_take_as_content_is_recognized(source: str, forms: MessageForms) -> None:
    assert Template(source).forms == forms


@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}]])
def test_a_text_is_a_part_to_templates_that_know_parts_alone(content: Any) -> None:
    """Those of LLaVA and Idefics, which would leave a text out without a word."""
    chosen = "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
    looped = "{{ m.content[0].type }}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p.text }}{% endif %}"
    for source, text in ((chosen, "hi"), (looped + "{% endfor %}", "texthi")):
        loop = f"{{% for m in messages %}}{source}{{% endfor %}}"
        assert render([{"role": "user", "content": content}], template=loop) == text
        continued = [{"role": "assistant", "content": content}]
        assert render(continued, None, loop + "!", False, True) == text


def test_tools_reach_templates_that_read_them_of_a_message() -> None:
    """In the manner of Phi 4 mini, which writes them, and of GLM 4, which loops over them."""
    loop = "{% for m in messages %}<{{ m.role }}>{% if m['tools'] is defined %}"
    writing = loop + "{{ '[' + m['tools'] + ']' }}{% endif %}{{ m.content }}{% endfor %}"
    looping = (
        loop + "{% for t in m['tools'] %}{{ t['function'].name }}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "köchin", "parameters": {}}}]
    as_text = '[[{"name": "köchin", "parameters": {}}]]'
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "s"}
    for source, shown in ((writing, as_text), (looping, "köchin")):
        assert render([user], tools, source) == f"<system>{shown}<user>x"
        assert render([system, user], tools, source) == f"<system>{shown}s<user>x"
        assert render([user], None, source) == "<user>x"
    assert render([{**system, "tools": "own"}, user], tools, writing) == "<system>[own]s<user>x"


def test_tool_use_template_is_taken_with_tools() -> None:
    chat, both = [{"role": "user", "content": "x"}], ChatTemplate({"default": "D", "tool_use": "T"})
    assert (render(chat, None, both), render(chat, TOOLS, both)) == ("D", "T")
    with pytest.raises(InputError, match="rag"):
        render(chat, None, ChatTemplate({"rag": "R"}))


def test_no_html_escapes_and_the_date() -> None:
    chat = [{"role": "user", "content": "<&>'\"é"}]
    assert render(chat, template="{{ messages[0].content | tojson }}") == '"<&>\'\\"é"'
    assert render(chat, template="{{ strftime_now('%Y-%m') }}") == datetime.datetime.now().strftime("%Y-%m")


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least one"),
        ("hi", "messages", "list"),
        (["hi"], "messages[0]", "object"),
        ([{"content": "x"}], "messages[0].role", "role"),
        ([USER, {"role": 3, "content": "x"}], "messages[1].role", "3"),
        ([{"role": "user"}], "messages[0].content", "required"),
        ([{"role": "user", "content": 3}], "messages[0].content", "int"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]", "int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "NoneType"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content", "surrogate"),
        ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls", "list"),
        ([{"role": "assistant", "reasoning": 3}], "messages[0].reasoning", "int"),
        ([{"role": "assistant", "reasoning_content": "\ud800"}], "messages[0].reasoning_content", "surrogate"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages[0].content", "thinking"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function", "name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
    ],
)
def test_bad_messages_are_named(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        render(messages, template=CHATML_STYLE)
    assert caught.value.param == param


def test_refusals_of_the_template_and_of_the_call() -> None:
    with pytest.raises(InputError, match="roles must alternate"):
        render([USER, USER], template=ChatTemplate(MISTRAL_STYLE, {"bos_token": ""}))
    with pytest.raises(InputError, match="failed on the messages"):
        render([USER], template="{{ 1 / 0 }}")
    with pytest.raises(InputError, match="no chat template"):
        render([USER])
    with pytest.raises(InputError, match="exclude each other"):
        render([USER], template="x", continue_final_message=True)
    with pytest.raises(InputError, match="does not render"):
        render([USER], None, "nothing", False, True)
    with pytest.raises(InputError, match="'tools'"):
        render([USER], template="x", kwargs={"tools": []})
    with pytest.raises(InputError, match="not valid Jinja"):
        render([USER], template="{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for x in range(10000000) %}{% endfor %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% include 'x' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InputError):
        render([USER], template=source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "loop steps"),
        ("{% macro f() %}{% for a in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}", "Recursion|steps"),
        ("{{ 'abcdefgh' * 100000000 }}", "over the limit"),
        ("{{ 100000000 * 'abcdefgh' }}", "over the limit"),
        ("{{ [1] * 100000000 }}", "over the limit"),
        ("{{ 9 ** 99999 }}", "4096 bits"),
        ("{% set n = namespace(i=9) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}", "4096 bits"),
        (
            "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "over the limit",
        ),
        (
            "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "over the limit",
        ),
        ("{% for i in range(999) %}{{ 'x' * 100000 }}{% endfor %}", "over the limit"),
    ],
)
def test_limits(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 100_000)
    with pytest.raises(InputError, match=words):
        render([USER], template=source)


def test_loop_variables_survive_the_meter() -> None:
    source = (
        "{% for a in [3, 4, 5] %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem }}{{ loop.last }};{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}-{% endfor %}"
        "{% for x in missing %}{% else %}none{% endfor %}"
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    )
    assert render([USER], template=source) == "1/3False;2/33False;3/34True;a1none12301"


def test_a_broken_template_shows_at_the_start_only_if_the_operator_gave_it(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, byte_level(), chat_template="{% for %}")
    with pytest.raises(InputError, match="not valid Jinja"):
        Tokenizer(folder).apply_chat_template([USER])
    with pytest.raises(ConfigError, match="not valid Jinja"):
        Tokenizer(folder, chat_template="{% for %}")


def test_a_file_of_templates_in_the_folder_is_used(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, byte_level(), eos_token="<|end|>")
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    assert Tokenizer(folder).apply_chat_template([USER], tokenize=False) == "<|end|>x"
