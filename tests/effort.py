"""How much of a sweep runs: a sample by default, all of it in `make test-long`, which sets QUIRE_WHOLE_SWEEPS.

QUIRE_SAMPLE: a number; each stands for another sample. `make test` counts commits: each has a sample of its own.

`python -m tests.effort RESULTS.xml…` writes anew which tests are slow, from files that `pytest --junit-xml` wrote.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

WHOLE = os.environ.get("QUIRE_WHOLE_SWEEPS") == "1"
SAMPLE = int(os.environ.get("QUIRE_SAMPLE", "0"))


def some(count: int, share: int = 3) -> int:
    """So many examples of `count`."""
    return count if WHOLE else max(1, count // share)


def sampled(cases: Sequence[Any], is_usual: Callable[[Any], bool]) -> list[Any]:
    """Parameters of which the unusual ones are `long`."""
    long = pytest.mark.long
    return [
        case if is_usual(case) else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=long)
        for case in cases
    ]


MANY_CASES = 8
# Where most cases start an engine, or run a scheduler for thousands of steps: fewer of them are many.
ENGINES = (
    "tests/e2e/", "tests/pooling/", "tests/router/", "tests/scheduling/", "tests/simulation/",
    "tests/cli/test_run_batch.py", "tests/engine/test_clients.py", "tests/frontend/test_restarts.py",
    "tests/server/test_beam_search.py", "tests/server/test_overload.py",
)  # fmt: skip
MANY_ENGINES = 2


SLOW_FILE = Path(__file__).with_name("slow_tests.txt")
SLOW_SECONDS = 3.0  # of a case
ONE_OF = 3


def without_parameters(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def chosen(names: Iterable[str], share: int) -> list[str]:
    """Those of the names that SAMPLE stands for: one of `share`."""
    ordered = sorted(names, key=lambda name: hashlib.blake2b(f"{SAMPLE} {name}".encode()).digest())
    return ordered[: some(len(ordered), share)]


def keep_some(items: Sequence[pytest.Item]) -> None:
    """Leave a sample; the others become `long`.

    Of every test with more than MANY_CASES cases a sixth stays, of all slow tests one of ONE_OF. What holds for the
    house holds for all of it.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if "tests/house/" not in item.nodeid and not any(map(item.get_closest_marker, ("gpu", "long"))):
            cases[without_parameters(item.nodeid)].append(item)
    slow = {line.split()[1] for line in SLOW_FILE.read_text(encoding="utf-8").splitlines()} & set(cases)
    left = slow - set(chosen(slow, ONE_OF))
    for name, same in cases.items():
        many = len(same) > (MANY_ENGINES if name.startswith(ENGINES) else MANY_CASES)
        kept = set() if name in left else set(chosen((item.nodeid for item in same), 6 if many else 1))
        for item in same:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.long)


def slow_tests(files: Iterable[str]) -> list[str]:
    """Lines for SLOW_FILE: seconds of a case in the mean, and the test's name. Of several runs the shortest counts."""
    shortest: dict[str, float] = {}
    for file in files:
        seconds = defaultdict[str, list[float]](list)
        for case in ElementTree.parse(file).iter("testcase"):
            name = without_parameters(f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}")
            seconds[name].append(float(case.attrib["time"]))
        for name, cases in seconds.items():
            shortest[name] = min(sum(cases) / len(cases), shortest.get(name, float("inf")))
    return [f"{took:5.1f} {name}" for name, took in sorted(shortest.items()) if took >= SLOW_SECONDS]


if __name__ == "__main__":
    SLOW_FILE.write_text("\n".join(slow_tests(sys.argv[1:])) + "\n", encoding="utf-8")
