"""The tables of docs/performance.md and README.md are those of the files of results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report

ROOT = Path(__file__).parents[2]


def test_pages_say_what_the_files_say() -> None:
    command = [sys.executable, "-m", "benchmarks.report", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, "run python -m benchmarks.report"


def test_who_is_better_is_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens a second, fewer milliseconds."""
    monkeypatch.setattr(report, "BESIDE_PEERS", ["llama-3.1-8b"])
    monkeypatch.setattr(report, "peer", lambda *_: 100.0)
    steps, rate = ("llama-3.1-8b", "T2", "batch=1", "step_ms"), ("llama-3.1-8b", "T1", "", "output_tok_s")
    found = {steps: report.Measured(101.0, 90.0), rate: report.Measured(101.0, 200.0)}
    lines = report.tables(found).splitlines()
    assert "| **101** | 100 | 200 |" in lines[2]
    assert "| 101.000 | **100.000** | 90.000 |" in lines[4]
    assert report.beside_peers(found, {2: "a step"}, floors=False)[2:] == ["| a step | 101.000 | **100.000** |"]


def test_a_figure_is_the_first_commits_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "BESIDE_PEERS", ["llama-3.1-8b"])
    steps, rate = ("llama-3.1-8b", "T2", "batch=1", "step_ms"), ("llama-3.1-8b", "T1", "", "output_tok_s")
    of = {
        "old": {steps: report.Measured(3.0, 2.0), rate: report.Measured(7.0, 9.0)},
        "new": {steps: report.Measured(2.5, 2.0)},
    }
    monkeypatch.setattr(report, "measured", lambda commit, _: of.get(commit, {}))
    lines = report.tables(report.of_commits(["new", "old"], "a")).splitlines()
    assert "| 7 |" in lines[2]
    assert "| **2.500** |" in lines[4]
    with pytest.raises(SystemExit, match="no file of another"):
        report.of_commits(["new", "another"], "a")
