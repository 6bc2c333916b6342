"""Writes docs/reference.md and quire/config/typed_options.py from the config fields, docs/errors.md from the catalogue
of errors, docs/migrate_*.md from both: each is said once.

python docs/generate.py [--check]     --check: exit 1 if a file on disk is not what would be written
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import sys
import textwrap
import types
import typing
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from migration import render_sglang, render_vllm  # noqa: E402

from quire.config.engine import SECTIONS  # noqa: E402
from quire.config.options import least_values, option_types  # noqa: E402
from quire.config.serve import ServeConfig  # noqa: E402
from quire.foundation.error_codes import TITLES as ERROR_PARTS  # noqa: E402

TITLES = {
    "model": "Model",
    "cache": "KV cache",
    "schedule": "Scheduling",
    "lora": "LoRA adapters",
    "replies": "Conversations: tools, reasoning, templates",
    "runtime": "Devices, processes, graphs",
    "observe": "Logs and statistics",
    "serve": "Server (`quire serve` only)",
}
HEAD = """# Options

Every option is a keyword of `LLM(...)` and `AsyncLLM`, a flag of the commands that start an engine (`max_model_len` is
`--max-model-len`), and a key of the YAML file given with `--config`. A key of an option that is a JSON object has a flag
of its own (`--hf-overrides.rope_scaling.factor 2`; `--option.key+ VALUE` appends to a list). This page is generated from
the option's own definition (`make docs`).
"""


def docstrings(file: Path, class_name: str) -> dict[str, str]:
    """Field → the string below it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name).body
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = ast.literal_eval(below.value)
            found[field.target.id] = " ".join(text.split())
    return found


def default_of(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    assert field.default_factory is not dataclasses.MISSING
    return repr(field.default_factory())


def _least(meta: msgspec.Meta) -> str:
    return f"> {meta.gt}" if meta.ge is None else f">= {meta.ge}"


def section(name: str, cls: type) -> str:
    module = sys.modules[cls.__module__]
    assert module.__file__
    texts = docstrings(Path(module.__file__), cls.__name__)
    least = {name: _least(meta) for name, meta in least_values(cls).items()}
    lines = [f"\n## {TITLES[name]}\n", "| option | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if field.name not in texts:
            raise SystemExit(f"{cls.__name__}.{field.name} has no docstring")
        text, kind = texts[field.name], type_text(option_types(cls)[field.name])
        if field.name in least:
            kind += f", {least[field.name]}"
        cells = [f"`{field.name}`", f"`{kind}`", f"`{default_of(field)}`", text]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def render() -> str:
    return HEAD + "".join(section(name, cls) for name, cls in {**SECTIONS, "serve": ServeConfig}.items())


OPTIONS_HEAD = '''"""Every option of an engine by its flat name and type, for editors and type checkers.

Generated from the sections of EngineConfig (`make docs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

'''
# Wider than in the config: LLM takes classes and turns them into names.
PYTHON_TYPES = dict.fromkeys(["logits_processors", "stat_loggers"], "Sequence[str | type]")


def type_text(kind: object) -> str:
    """A type as it is written: only those that options have."""
    origin = typing.get_origin(kind)
    if kind is typing.Any:
        return "Any"
    if kind is type(None):
        return "None"
    if origin is typing.Literal:
        return "Literal[" + ", ".join(f'"{value}"' for value in typing.get_args(kind)) + "]"
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(type_text, typing.get_args(kind)))
    if origin is not None:
        return f"{origin.__name__}[" + ", ".join(map(type_text, typing.get_args(kind))) + "]"
    assert isinstance(kind, type), kind
    return kind.__name__


def default_text(field: dataclasses.Field[object]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        empty = field.default_factory()
        assert empty in ([], {}), f"{field.name}: only empty lists and objects are defaults so far"
        return f"field(default_factory={type(empty).__name__})"
    return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)


def render_options() -> str:
    keys, fields = [], []
    for cls in SECTIONS.values():
        hints = typing.get_type_hints(cls)
        module = sys.modules[cls.__module__]
        assert module.__file__
        texts = docstrings(Path(module.__file__), cls.__name__)
        for one in dataclasses.fields(cls):
            kind = PYTHON_TYPES.get(one.name) or type_text(hints[one.name])
            if one.name != "model":  # the first argument of whoever takes the options
                about = textwrap.fill(f'"""{texts[one.name]}"""', 116, initial_indent="    ", subsequent_indent="    ")
                keys.append(f"    {one.name}: {kind}\n{about}")
            fields.append(f"    {one.name}: {kind} = {default_text(one)}")
    return (
        OPTIONS_HEAD
        + '\nclass EngineOptions(TypedDict, total=False):\n    """What `LLM(model, ...)` takes."""\n\n'
        + "\n".join(keys)
        + '\n\n\n@dataclass(kw_only=True)\nclass OptionFields:\n    """The same with defaults, and the model."""\n\n'
        + "\n".join(fields)
        + "\n"
    )


ERRORS_HEAD = """# Errors

What goes wrong says what it is, what to do, and its code: a command on stderr (`quire explain CODE` is a section of this page in
the terminal), a server in the header `x-error-code`, an exception of the Python API as `quire.foundation.error_codes.entry_of(error).code`.
A command tells it in at most 15 lines; `-v` adds where it comes from. Exit codes: 1 failed, 2 a bad option, model or package,
3 does not fit in memory, 4 the engine died.

Generated from `quire/foundation/error_entries.py` (`make docs`).
"""


def render_errors() -> str:
    parts = [ERRORS_HEAD]
    for title, entries in ERROR_PARTS.items():
        parts.append(f"\n## {title}\n")
        for entry in entries:
            parts.append(f"\n### {entry.code}\n\n{entry.cause} **What to do:** {entry.remedy}\n")
            if entry.more:
                parts.append(f"\n{entry.more}\n")
    return "".join(parts)


def main() -> None:
    for target, text in (
        (ROOT / "docs" / "reference.md", render()),
        (ROOT / "docs" / "errors.md", render_errors()),
        (ROOT / "docs" / "migrate_vllm.md", render_vllm()),
        (ROOT / "docs" / "migrate_sglang.md", render_sglang()),
        (ROOT / "quire" / "config" / "typed_options.py", render_options()),
    ):
        if "--check" not in sys.argv:
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{target.relative_to(ROOT)} is out of date: run `make docs`")


if __name__ == "__main__":
    main()
