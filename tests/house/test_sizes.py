"""What one can take in: rooms, files and functions have a size at most."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_FILES = 40  # in one folder, those of its sub-rooms not counted
MOST_LINES = 60  # of a function without its docstring; kernels, which are one loop each, aside


def test_no_room_is_too_full() -> None:
    files = [file for part in ("quire", "tests", "benchmarks") for file in (ROOT / part).rglob("*.py")]
    full = {str(room.relative_to(ROOT)): n for room, n in Counter(f.parent for f in files).items() if n > MOST_FILES}
    assert full == {}


def test_no_function_is_too_long() -> None:
    long = {}
    for file in (ROOT / "quire").rglob("*.py"):
        if "triton" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                told = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
                lines = (node.end_lineno or 0) - node.lineno + 1 - told
                if lines > MOST_LINES:
                    long[f"{file.relative_to(ROOT)}: {node.name}"] = lines
    assert long == {}
