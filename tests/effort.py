"""How much of a sweep runs: a sample by default, all of it in `make test-long`, which sets QUIRE_WHOLE_SWEEPS.

QUIRE_SAMPLE: a number; each stands for another sample. Without it the same cases run each time.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

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


def keep_some(items: Sequence[pytest.Item]) -> None:
    """Of every test with more than MANY_CASES cases a sixth stays, those that SAMPLE stands for; the others become
    `long`. What holds for the house holds for all of it.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if "tests/house/" not in item.nodeid and not any(map(item.get_closest_marker, ("gpu", "long"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, same in cases.items():
        if len(same) > (MANY_ENGINES if name.startswith(ENGINES) else MANY_CASES):
            same.sort(key=lambda item: zlib.crc32(item.nodeid.encode(), SAMPLE))
            for item in same[some(len(same), 6) :]:
                item.add_marker(pytest.mark.long)
