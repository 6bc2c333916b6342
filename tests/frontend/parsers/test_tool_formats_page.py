"""docs/tool_formats.md names every format, and its example works."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.parsers import join, read
from quire.foundation.registry import Registry
from quire.parsers import base
from quire.types.reply import Tool

PAGE = (Path(__file__).parents[3] / "docs" / "tool_formats.md").read_text(encoding="utf-8")


def test_all_formats_are_named() -> None:
    rows = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| ") and "`--" not in line]
    assert sorted(re.findall(r"`([^`]+)`", "".join(rows))) == sorted(base.TOOL_FORMATS)


def test_the_example(monkeypatch) -> None:
    monkeypatch.setattr(base, "TOOL_FORMATS", Registry("tool parser", {}))
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    form = base.TOOL_FORMATS.get("my_format")
    found = join(read(form, [], ['<call>{"name": "f", "arguments": {"a": 1}}</call>']))
    assert found == [("start", 0, "f"), ("arguments", 0, '{"a": 1}'), ("end", 0)]
    assert form.constraint([Tool("f")], required=False, parallel=True) is not None
