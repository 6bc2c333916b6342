"""What a start says of itself while it takes long."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.types.ranks import ALONE, Rank
from quire.worker import phases
from quire.worker.phases import Phases

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(phases, "PATIENCE", 0.05)
    monkeypatch.setattr(phases._log, "warning", lambda line, *values: found.append(line % values))
    return found


def test_what_is_over_soon_is_not_told(lines: list[str]) -> None:
    clock = Phases(ALONE)
    for name in phases._DOING:
        with clock.at(name):
            pass
    time.sleep(0.2)
    assert not lines
    assert list(clock.seconds) == list(phases._DOING)


def test_what_takes_long_is_told_ever_more_seldom_until_it_is_over(lines: list[str]) -> None:
    clock = Phases(Rank(1, 2))
    with clock.at("weights"):
        until = time.monotonic() + 10
        while len(lines) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert clock.seconds["weights"] >= 0.05 + 0.1 + 0.2
    told = len(lines)
    assert lines[0] == "rank 1 of 2: still loading weights, for 0 s"
    time.sleep(1)
    assert len(lines) == told


def test_a_phase_that_fails_is_none(lines: list[str]) -> None:
    clock = Phases(ALONE)
    with pytest.raises(OSError), clock.at("weights"):
        raise OSError
    time.sleep(0.2)
    assert not lines
    assert not clock.seconds


WAITS = """
import sys
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.types.ranks import Rank
from quire.worker import phases
from quire.worker.worker import Worker
phases.PATIENCE = 0.3
Worker(resolve(EngineConfig.from_flat(device="cpu", tensor_parallel_size=2)), Rank(0, 2, sys.argv[1])).start()
"""


def test_a_rank_says_that_it_waits_for_one_that_never_comes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS, str(tmp_path / "meeting")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            line = next(line for line in process.stderr if "still" in line)
        finally:
            process.kill()
    assert "rank 0 of 2: still waiting for the other ranks: each must have been started, and reach this one" in line
