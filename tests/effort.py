"""How much of a sweep runs: a sample by default, all of it in `make test-long`, which sets QUIRE_WHOLE_SWEEPS."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

WHOLE = os.environ.get("QUIRE_WHOLE_SWEEPS") == "1"


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
