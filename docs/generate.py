"""Writes docs/reference.md from the config fields: each option is said once, in its field.

python docs/generate.py [--check]     --check: exit 1 if the file on disk is not what would be written
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quire.config.engine import SECTIONS  # noqa: E402
from quire.config.serve import ServeConfig  # noqa: E402

TITLES = {
    "model": "Model",
    "cache": "KV cache",
    "schedule": "Scheduling",
    "replies": "Conversations: tools, reasoning, templates",
    "runtime": "Devices, processes, graphs",
    "observe": "Logs and statistics",
    "serve": "Server (`quire serve` only)",
}
HEAD = """# Options

Every option is a keyword of `LLM(...)` and `AsyncLLM`, a flag of the commands that start an engine (`max_model_len` is
`--max-model-len`), and a key of the YAML file given with `--config`. This page is generated from the option's own
definition (`make docs`).
"""


def docstrings(file: Path, class_name: str) -> dict[str, tuple[str, str]]:
    """Field → (type as written, the string below it)."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name).body
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = ast.literal_eval(below.value)
            found[field.target.id] = (ast.unparse(field.annotation), " ".join(text.split()))
    return found


def default_of(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    assert field.default_factory is not dataclasses.MISSING
    return repr(field.default_factory())


def section(name: str, cls: type) -> str:
    module = sys.modules[cls.__module__]
    assert module.__file__
    texts = docstrings(Path(module.__file__), cls.__name__)
    lines = [f"\n## {TITLES[name]}\n", "| option | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if field.name not in texts:
            raise SystemExit(f"{cls.__name__}.{field.name} has no docstring")
        kind, text = texts[field.name]
        cells = [f"`{field.name}`", f"`{kind}`", f"`{default_of(field)}`", text]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def render() -> str:
    return HEAD + "".join(section(name, cls) for name, cls in {**SECTIONS, "serve": ServeConfig}.items())


def main() -> None:
    target = ROOT / "docs" / "reference.md"
    text = render()
    if "--check" in sys.argv:
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            raise SystemExit("docs/reference.md is out of date: run `make docs`")
        return
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
