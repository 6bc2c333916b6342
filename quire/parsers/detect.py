"""Which formats a model writes, told by its chat template, which renders earlier calls as the model writes new ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Sign:
    """A template is of the format `name` if all of `texts` are in it, none of `without`, and the model is one of
    `models` (beginnings of config.json's model_type or architecture, without regard to case; () is any)."""

    name: str
    texts: tuple[str, ...]
    without: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def fits(self, template: str, models: Iterable[str]) -> bool:
        return (
            all(text in template for text in self.texts)
            and not any(text in template for text in self.without)
            and (not self.models or any(model.lower().startswith(self.models) for model in models))
        )


# The first that fits counts: the rarer the marker, the earlier.
_TOOLS = (
    _Sign("minimax_m3", ("]<]minimax[>[",)),
    _Sign("minimax_m2", ("minimax:tool_call>",)),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Sign("kimi_k2", ("<|im_middle|>",)),
    _Sign("deepseek_v32", ("｜DSML｜", "function_calls>")),
    _Sign("deepseek_v4", ("｜DSML｜",)),
    _Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Sign("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _Sign("step3", ("steptml:invoke",)),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("longcat", ("<longcat_tool_call>",)),
    _Sign("inkling", ("<|content_invoke_tool_json|>",)),
    _Sign("openai", ("<|channel|>", "<|message|>")),
    _Sign("functiongemma", ("<start_function_call>",)),
    _Sign("gemma4", ("<|tool_call>", "<tool_call|>")),
    _Sign("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    _Sign("cohere_command3", ("<|START_ACTION|>",)),
    _Sign("apertus", ("<|tools_prefix|>",)),
    _Sign("gigachat3", ("<|role_sep|>", "function call")),
    _Sign("gigachat3", ("<|function_call|>",)),
    _Sign("internlm", ("<|action_start|>",)),
    _Sign("lfm2", ("<|tool_call_start|>",)),
    _Sign("lfm2", ("<|tool_list_start|>",)),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("hy_v3", ("<arg_key", "<tool_sep")),
    _Sign("poolside_v1", ("<arg_key>",), models=("laguna", "poolside")),
    _Sign("glm47", ("<arg_key>", "{function-name}<arg_key>")),
    _Sign("glm45", ("<arg_key>",)),
    _Sign("step3p5", ("<function=", "<parameter="), models=("step3p5", "step3_5")),
    _Sign("mimo", ("<function=", "<parameter="), models=("mimo",)),
    _Sign("qwen3_coder", ("<function=", "<parameter=")),
    _Sign("minicpm5", ("<function name=", "<param name=")),
    _Sign("granite", ("<|tool_call|>",)),
    _Sign("granite-20b-fc", ("<function_call>",)),
    _Sign("olmo3", ("<function_calls>",)),
    _Sign("ernie45", ("<tool_call>", "<response>")),
    _Sign("jamba", ("<tool_calls>",), models=("jamba",)),
    _Sign("hunyuan_a13b", ("<tool_calls>",)),
    _Sign("granite4", ("<tool_call>",), models=("granite",)),
    _Sign("hermes", ("<tool_call>",)),
    _Sign("phi4_mini_json", ("functools",)),
    _Sign("phi4_mini_json", ("<|tool|>",), models=("phi",)),
    _Sign("llama4_pythonic", ("[func_name1(",), models=("llama4",)),
    _Sign("llama4_pythonic", ("[func_name1(", "<|header_start|>")),
    _Sign("pythonic", ("[func_name1(",)),
    _Sign("llama4_json", ('{"name": function name',), models=("llama4",)),
    _Sign("llama4_json", ('{"name": function name', "<|header_start|>")),
    _Sign("llama3_json", ('{"name": function name',)),
    _Sign("llama3_json", ("<|python_tag|>",)),
)

_REASONING = (
    _Sign("openai_gptoss", ("<|channel|>", "<|message|>")),
    _Sign("inkling", ("<|content_thinking|>",)),
    _Sign("gemma4", ("<|channel>",)),
    _Sign("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    _Sign("cohere_command3", ("<|START_THINKING|>",)),
    _Sign("mistral", ("[THINK]",)),
    _Sign("seed_oss", ("<seed:think>",)),
    _Sign("minimax_m3", ("<mm:think>",)),
    _Sign("granite", ("Here is my thought process:",)),
    _Sign("hunyuan_a13b", ("<think>", "<answer>")),
    _Sign("holo2", ("<think>",), models=("holo2",)),
    _Sign("nemotron_v3", ("<think>",), models=("nemotron",)),
    _Sign("mimo", ("<think>",), models=("mimo",)),
)

# Families whose calls tell them, if their template also knows thinking.
_REASONING_OF_TOOLS = {
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v4": "deepseek_v4",
    "ernie45": "ernie45",
    "glm45": "glm45",
    "glm47": "glm47",
    "hy_v3": "hy_v3",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "olmo3": "olmo3",
    "poolside_v1": "poolside_v1",
    "step3": "step3",
    "step3p5": "step3p5",
}


def detect_tool_format(template: str, models: Iterable[str] = ()) -> str | None:
    """The name in TOOL_FORMATS. models: model_type and architectures of config.json, to tell relatives apart."""
    return _first(_TOOLS, template, tuple(models))


def detect_reasoning_format(template: str, models: Iterable[str] = ()) -> str | None:
    """The name in REASONING_FORMATS; None if the template knows no thinking."""
    models = tuple(models)
    name = _first(_REASONING, template, models)
    if name is not None or "think" not in template:
        return name
    tools = detect_tool_format(template, models)
    if tools in _REASONING_OF_TOOLS and ("<think" in template or "</think" in template):
        return _REASONING_OF_TOOLS[tools]
    if "enable_thinking" not in template and "<think>" in template.rpartition("add_generation_prompt")[2]:
        return "deepseek_r1"  # thinking that cannot be switched off: the prompt begins it
    return "qwen3" if "think>" in template else None  # which takes an answer without its marker for no reasoning


def _first(signs: Iterable[_Sign], template: str, models: tuple[str, ...]) -> str | None:
    return next((sign.name for sign in signs if sign.fits(template, models)), None)
