"""The code blocks of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^(<!-- run -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DRAWN = re.compile(r"[│┌▼═▶]|──")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    is_run: bool  # marked to be executed as it stands, after those before it on its page

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[2], match[3], match[1] is not None))
    return found


def commands(block: Block) -> list[str]:
    """Lines of a shell, those that go on joined; comments left out."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def is_shell(block: Block) -> bool:
    """Blocks without a language are commands, unless they are drawings or samples of something."""
    if block.language in ("bash", "sh", "shell"):
        return True
    first = block.text.split(maxsplit=1)[0] if block.text.strip() else ""
    starts = ("quire", ".venv", "make", "curl", "python", "docker", "helm", "git", "system", "QUIRE", "install", "pip")
    return not block.language and not DRAWN.search(block.text) and first.startswith(starts)
