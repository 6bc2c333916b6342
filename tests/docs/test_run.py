"""Blocks marked `<!-- run -->` are executed as they stand, a page's after each other in one shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks

MARKED = [block for block in blocks() if block.is_run]
PAGES = sorted({block.page for block in MARKED})


def script(marked: list[Block], folder: Path) -> str:
    """One bash script; each block is told before it runs, and what fails ends it."""
    parts = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for number, block in enumerate(marked):
        parts.append(f"echo '== {block}'")
        if block.language == "python":
            file = folder / f"block{number}.py"
            file.write_text(block.text)
            parts.append(f"{shlex.quote(sys.executable)} {file}")
        else:
            parts.append(block.text)
    return "\n".join(parts)


@pytest.mark.parametrize(
    ("page", "count"),
    [pytest.param(page, count, marks=() if count else pytest.mark.long) for page in PAGES for count in (1, None)],
    ids=lambda given: getattr(given, "name", given and f"{given} of them"),
)
def test_what_a_page_says_works(page: Path, count: int | None, tmp_path: Path) -> None:
    """count: so many blocks of the page, from its beginning; None: all."""
    marked = [block for block in MARKED if block.page == page][:count]
    (tmp_path / "bin").mkdir()
    quire = tmp_path / "bin" / "quire"
    quire.write_text(f'#!/bin/sh\nexec {sys.executable} -m quire.cli.main "$@"\n')
    quire.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-c", script(marked, tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("== ") >= len(marked)
    if page.name == "first_hour.md" and count is None:
        assert done.stdout.count("Paris") >= 3  # the demo model knows
        assert '"content":"yes"' in done.stdout or '"content":"no"' in done.stdout
        assert "completed" in done.stdout
