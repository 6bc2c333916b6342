"""What the documents point at is there: links, and files that are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for folder in (ROOT, ROOT / "docs", ROOT / "demo", ROOT / "examples", ROOT / "examples" / "plugin", ROOT / "quire")
    for page in (folder.rglob("*.md") if folder.name == "quire" else folder.glob("*.md"))
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.py)`")
MOST_WORDS = 2500  # of the design: half an hour


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page if not path else page.parent / path
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: no such title"


def missing_files(page: Path) -> Iterator[str]:
    """A file is named from the root, from quire/, from its room or by its page; readers' own files are none of ours."""
    for name in NAMED.findall(page.read_text(encoding="utf-8")):
        rooms = (ROOT, ROOT / "quire", page.parent, page.parent.parent)
        if not any((room / name).exists() for room in rooms):
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name in ("README.md", "design.md")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_that_are_named_exist(page: Path) -> None:
    assert list(missing_files(page)) == []


def test_the_lines_of_those_that_are_there_are_near_what_is_said() -> None:
    said = re.findall(r"\| `([\w/]+\.py)` (\d+) \|$", (ROOT / "docs" / "design.md").read_text("utf-8"), re.MULTILINE)
    assert len(said) >= 10
    for name, lines in said:
        count = len((ROOT / "quire" / name).read_text("utf-8").splitlines())
        assert abs(count - int(lines)) <= max(10, count // 5), (name, count)


def test_the_design_is_read_in_half_an_hour() -> None:
    assert len((ROOT / "docs/design.md").read_text(encoding="utf-8").split()) <= MOST_WORDS
