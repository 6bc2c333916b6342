"""Formats are told by chat templates: short pieces of templates in the style of each family."""

from __future__ import annotations

import pytest

from quire.parsers.base import TOOL_FORMATS
from quire.parsers.detect import _TOOLS, detect_reasoning_format, detect_tool_format

HERMES = "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
TAGS = "<tool_call>\n<function={{ c.name }}>{% for k, v in c.args | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>"
GLM = "<tool_call>{{ c.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n</tool_call>"
R1 = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.name + '\\n```json\\n' }}"
V31 = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.args + '<｜tool▁call▁end｜>' }}"
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
PYTHONIC = "Put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]"
QWEN_THINKS = (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)

TOOLS = [
    (HERMES, (), "hermes"),
    (HERMES, ("granitemoehybrid", "GraniteMoeHybridForCausalLM"), "granite4"),
    (TAGS, ("qwen3_moe",), "qwen3_coder"),
    (TAGS, ("MiMoForCausalLM",), "mimo"),
    (TAGS, ("step3p5",), "step3p5"),
    (TAGS.replace("tool_call>", "seed:tool_call>"), (), "seed_oss"),
    (GLM, ("glm4_moe",), "glm45"),
    (GLM + "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", (), "glm47"),
    (GLM, ("laguna",), "poolside_v1"),
    (GLM.replace("\n<arg_key>", "<tool_sep>\n<arg_key>"), (), "hy_v3"),
    (R1, (), "deepseek_v3"),
    (V31, (), "deepseek_v31"),
    ("<｜DSML｜function_calls>\n<｜DSML｜invoke name=", (), "deepseek_v32"),
    ("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=", (), "deepseek_v4"),
    ("<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>{{ c.id }}", (), "kimi_k2"),
    ("{{ '[TOOL_CALLS]' + calls | tojson }}", (), "mistral"),
    ("{{ '<|start|>assistant<|channel|>commentary to=functions.' + name + '<|message|>' }}", (), "openai"),
    ("<|header_start|>" + LLAMA, (), "llama4_json"),
    (LLAMA, ("llama",), "llama3_json"),
    (PYTHONIC, ("llama",), "pythonic"),
    (PYTHONIC, ("llama4",), "llama4_pythonic"),
    ("<minimax:tool_call>", (), "minimax_m2"),
    ("{% set ns = ']<]minimax[>[' %}<tool_call>", (), "minimax_m3"),
    ("<tool_calls>[{{ c | tojson }}]</tool_calls>", ("jamba",), "jamba"),
    ("<tool_calls>[{{ c | tojson }}]</tool_calls>", ("hunyuan_v1_moe",), "hunyuan_a13b"),
    ("<|START_ACTION|>[{{ c }}]<|END_ACTION|><|START_RESPONSE|>", (), "cohere_command3"),
    ("<|START_ACTION|>[{{ c }}]<|END_ACTION|><|START_TEXT|>", (), "cohere_command4"),
    ("<start_function_call>call:{{ name }}", (), "functiongemma"),
    ("<|tool_call>call:{{ name }}<tool_call|>", (), "gemma4"),
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}", ("qwen2",), None),
    ("", (), None),
]

REASONING = [
    (HERMES + QWEN_THINKS, ("qwen3",), "qwen3"),
    (TAGS + QWEN_THINKS, ("nemotron_h",), "nemotron_v3"),
    (HERMES + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}", (), "deepseek_r1"),
    (R1 + "{{ content.split('</think>')[-1] }}", (), "deepseek_r1"),
    (V31 + "{% if thinking %}<think>{% else %}</think>{% endif %}", (), "deepseek_v3"),
    (GLM + "{{ '<think></think>' }}", ("glm4_moe",), "glm45"),
    ("<|start|>assistant<|channel|>analysis<|message|>", (), "openai_gptoss"),
    ("[THINK]{{ r }}[/THINK]", (), "mistral"),
    ("<seed:think>", (), "seed_oss"),
    ("<think>\n{{ r }}\n</think>\n<answer>", (), "hunyuan_a13b"),
    (HERMES + "{{ content.split('</think>')[-1] }}{% if add_generation_prompt %}assistant{% endif %}", (), "qwen3"),
    (HERMES, (), None),
]


@pytest.mark.parametrize(("template", "models", "name"), TOOLS)
def test_tool_format(template: str, models: tuple[str, ...], name: str | None) -> None:
    assert detect_tool_format(template, models) == name


@pytest.mark.parametrize(("template", "models", "name"), REASONING)
def test_reasoning_format(template: str, models: tuple[str, ...], name: str | None) -> None:
    assert detect_reasoning_format(template, models) == name


def test_all_names_are_known() -> None:
    assert {sign.name for sign in _TOOLS} <= set(TOOL_FORMATS)
