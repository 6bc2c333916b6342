"""The list of slow tests names tests that are there, and what `make test` leaves out of them is in another commit's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import effort

ROOT = Path(__file__).parents[2]
NAMES = [line.split()[1] for line in effort.SLOW_FILE.read_text(encoding="utf-8").splitlines()]


def test_every_name_is_a_test() -> None:
    gone = []
    for name in NAMES:
        path, _, function = name.partition("::")
        file = ROOT / path
        if not file.is_file() or f"def {function}(" not in file.read_text(encoding="utf-8"):
            gone.append(name)
    assert not gone, "write the list anew: python -m tests.effort"


def test_each_is_in_some_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "WHOLE", False)
    left = set(NAMES)
    for sample in range(60):
        monkeypatch.setattr(effort, "SAMPLE", sample)
        some = effort.chosen(NAMES, effort.ONE_OF)
        assert len(some) == len(NAMES) // effort.ONE_OF
        left -= set(some)
    assert not left
