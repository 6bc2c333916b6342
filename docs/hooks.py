"""What the site has beside the pages of docs/: the rooms' READMEs, the project's own pages, the Python API, all results.

Hooks of MkDocs. Links that leave docs/ are led to the pages made here, or else to the source.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
           "SECURITY.md": "security.md", "CODE_OF_CONDUCT.md": "code_of_conduct.md"}  # fmt: skip
HANDLED = "results.md"


def rooms() -> dict[str, str]:
    """README of a room → its page."""
    found = sorted(ROOT.glob("quire/**/README.md"))
    names = {file: "-".join(file.relative_to(ROOT / "quire").parent.parts) for file in found}
    return {str(file.relative_to(ROOT)): f"rooms/{name}.md" for file, name in names.items()}


def on_config(config: Any) -> Any:
    """A page that has no place in mkdocs.yml yet is found under "More"."""
    placed = str(config["nav"])
    others = sorted(page.name for page in (ROOT / "docs").glob("*.md") if f"'{page.name}'" not in placed)
    if others:
        config["nav"].append({"More": others})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {**OUTSIDE, **rooms()}
    for source, target in pages.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=relink(text, source, target, config["repo_url"])))
    for target, text in {"python_api.md": python_api(), HANDLED: results()}.items():
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    source = page.file.src_uri
    if (ROOT / "docs" / source).exists():
        return relink(markdown, f"docs/{source}", source, config["repo_url"])
    return markdown


def relink(text: str, source: str, target: str, repository: str) -> str:
    """Links of a file of the source, from its page in the site."""
    pages = {**OUTSIDE, **rooms()}

    def led(match: re.Match[str]) -> str:
        link = match[2]
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path in pages:
            page = pages[path]
        elif path.startswith("docs/") and (ROOT / path).suffix == ".md":
            page = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            return f"{match[1]}{repository}/blob/main/{path}{match[3]}"
        else:
            return match[0]
        return match[1] + posixpath.relpath(page, posixpath.dirname(target) or ".") + match[3]

    return LINK.sub(led, text)


def python_api() -> str:
    """What `from quire import …` gives, from the sources' own types and docstrings."""
    import quire

    parts = ["# Python API\n\nWhat `from quire import …` gives. Shapes, units and errors are in the docstrings.\n"]
    for name, module in quire._EXPORTS.items():
        parts.append(f"## {name}\n\n::: {module}.{name}\n    options: {{heading_level: 3, show_root_heading: false}}\n")
    return "\n".join(parts)


def results() -> str:
    """Every file of benchmarks/results: newest first, the command, and each figure beside its floor."""
    parts = ["# Results\n\nEvery measurement that is kept, newest first, with the command that made it. A floor is what the device "
             "could do at best. Discussed in [performance](performance.md).\n"]  # fmt: skip
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json"), reverse=True):
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = found.get("rows") or []
        parts.append(
            f"\n## {file.stem}\n\n`{found.get('command', '')}` on {found.get('device', '')}, {found.get('date', '')}\n"
        )
        lines = ["", "| test | model | case | metric | value | floor |", "|---|---|---|---|---|---|"]
        for row in rows:
            cells = [row.get(name) for name in ("test", "model", "case", "metric")]
            value, floor = (number(row.get(name)) for name in ("value", "floor"))
            lines.append(
                "| "
                + " | ".join(str(cell or "").replace("|", "\\|") for cell in cells)
                + f" | {value} {row.get('unit') or ''} | {floor} |"
            )
        parts.append("\n".join(lines) + "\n" if rows else "")
    return "\n".join(parts)


def number(value: Any) -> str:
    return f"{value:,.5g}" if isinstance(value, int | float) else ""
