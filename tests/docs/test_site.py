"""The site is built without a broken link, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs quire[docs]: make site")
ROOT = Path(__file__).parents[2]


def build(target: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_it_is_built_whole_and_by_itself(tmp_path: Path) -> None:
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING " not in done.stdout + done.stderr
    pages = {file.parent.name: file.read_text("utf-8") for file in (tmp_path / "site").rglob("index.html")}
    assert {"errors", "python_api", "results", "kernels", "migrate_sglang", "first_hour"} <= pages.keys()
    assert "tensor_parallel_size" in pages["reference"]
    assert "max_tokens" in pages["python_api"]
    for name, page in pages.items():
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:)', page)
        fetched += re.findall(r'<link[^>]* rel="(?:stylesheet|preload|icon)"[^>]* href="(https?:)', page)
        assert fetched == [], name


def test_a_broken_link_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nstrict: true\ntheme: {name: material}\n")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr
