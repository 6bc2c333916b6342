"""Reasoning formats: what is reasoning and what is content does not depend on how the text comes."""

from __future__ import annotations

import pytest

from benchmarks.reasoning import parsed, plan_of, sweep
from benchmarks.reasoning_answers import WRITERS, Written
from quire.frontend.replies import Reply
from quire.parsers.base import REASONING_FORMATS

ANSWERS, CUTS = 60, 12  # of each format; `python -m benchmarks.reasoning` does all cuts of many more


@pytest.mark.parametrize("name", WRITERS)
def test_split_as_written_however_it_is_cut(name: str) -> None:
    _, flaws = sweep(name, ANSWERS, seed=1, most_cuts=CUTS)
    assert not flaws


def test_all_names_are_tested_and_load() -> None:
    assert set(REASONING_FORMATS) == set(WRITERS)
    assert len(WRITERS) == 28
    for name in REASONING_FORMATS:
        REASONING_FORMATS.get(name)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        # A section of calls ends reasoning too, and belongs to what follows.
        ("kimi_k2", "", "<think>so<|tool_calls_section_begin|>x", "so", "<|tool_calls_section_begin|>x"),
        ("deepseek_v4", "<think>", "so\n<｜DSML｜tool_calls>x", "so", "<｜DSML｜tool_calls>x"),
        # The suffix of the markers is the one the prompt ends with.
        ("hy_v3", "user<think:7f>", "so</think>no</think:7f>yes", "so</think>no", "yes"),
        ("hy_v3", "user<think:7f></think:7f>", "yes</think:7f>", "", "yes</think:7f>"),
        # A marker twice; newlines belong to the markers; half a marker at the end is text after all.
        ("qwen3", "<think>\n", "<think>\n\nso\n\n</think>\n\n</think>\n\nyes\n", "so", "yes\n"),
        ("qwen3", "<think>\n", "so</thi", "so</thi", ""),
        ("qwen3", "", "<thi", "", "<thi"),
        ("qwen3", "", " \nyes <think> later</think>", "", " \nyes <think> later</think>"),
        ("deepseek_r1", "", "never ended", "never ended", ""),
        ("deepseek_v3", "", "not asked to think</think>", "", "not asked to think</think>"),
        ("ernie45", "<think></think>", "<response>\nyes\n</response>\n<tool_call>", "", "yes<tool_call>"),
        ("granite", "", "Here is my thought process: so.\nHere's my response: yes", "so.", "yes"),
        ("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>so<|end|><|start|>assi", "so", ""),
    ],
)
def test_cases(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    plan = plan_of(name, Written(text, reasoning, content, prompt))
    if plan.is_plain:
        assert (reasoning, content) == ("", text)
        return
    for portions in ([text], list(text)):
        assert parsed(plan, portions) == Reply(reasoning, content)
