"""Docstrings of what users call and implement have one form, which tools read (Args, Returns, Raises, Shapes)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "quire"
# Files of the public classes, and of the base classes that others implement; classes not named are no door.
DOORS = {
    "llm.py": {"LLM"},
    "frontend/async_engine.py": {"AsyncLLM"},
    "frontend/llm_engine.py": {"LLMEngine"},
    "frontend/pooling/api.py": {"PoolingAPI"},
    "attention/base.py": {"AttentionBackend", "PromptAttention"},
    "platforms/base.py": {"Platform"},
    "executor/base.py": {"StepFuture", "Executor"},
    "grammar/base.py": {"Matcher", "Backend"},
    "parsers/base.py": {"Parser", "ToolFormat", "ReasoningFormat"},
    "engine/client.py": {"EngineClient"},
    "quantization/base.py": {"Matrix", "WeightFormat", "QuantizationMethod"},
    "worker/sampling/plugins.py": {"LogitsProcessor"},
}
SECTION = re.compile(r"(?m)^(Args|Returns|Yields|Raises|Shapes):\n((?:[ ]{4}.*\n?|\n)*)")


def doors() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for file, classes in DOORS.items():
        found = [n for n in ast.parse((ROOT / file).read_text("utf-8")).body if isinstance(n, ast.ClassDef)]
        assert classes <= {one.name for one in found}, file
        for one in found:
            for method in one.body:
                is_public = isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name[0] != "_"
                if is_public and one.name in classes:
                    yield f"{file}: {one.name}.{method.name}", method, ast.get_docstring(method) or ""


def test_what_is_raised_stands_in_a_section() -> None:
    wrong = [name for name, _, text in doors() if re.search(r"\b[Rr]aises (\w+Error|what)", SECTION.sub("", text))]
    assert wrong == []


def test_sections_name_parameters_that_there_are_and_leave_none_out() -> None:
    wrong = []
    for name, method, text in doors():
        sections = dict(SECTION.findall(text + "\n"))
        if "Args" not in sections:
            continue
        spec = method.args
        every = {arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)} - {"self", "cls"}
        every |= {f"*{spec.vararg.arg}"} if spec.vararg else set()
        told = set(re.findall(r"(?m)^    (\**\w+):", sections["Args"]))
        if told != every - ({"options"} if spec.kwarg else set()):
            wrong.append((name, told ^ every))
    assert wrong == []
