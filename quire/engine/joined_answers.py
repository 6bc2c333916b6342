"""What several cores answer to one question, as one answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from quire.foundation.errors import InputError

Answers = dict[int, Any]  # plain data by the cores' numbers, of one core at least


def _same(answers: Answers) -> Any:
    """They say the same, or have raised."""
    return next(iter(answers.values()))


def _all(answers: Answers) -> bool:
    return all(answers.values())


def _one_behind_the_other(answers: Answers) -> list[Any]:
    return list(chain.from_iterable(answers.values()))


def _views(answers: Answers) -> list[Any]:
    return [{**view, "engine": number} for number, views in answers.items() for view in views]


def _life(answers: Answers) -> list[Any] | None:
    """Of a request that another core had before, too: both know of it. None: none does."""
    events = chain.from_iterable(events for events in answers.values() if events is not None)
    return sorted(events, key=lambda event: event[0]) or None


def _files(answers: Answers) -> str | None:
    return ", ".join(filter(None, answers.values())) or None


# "stats" and "reset_prefix_cache" concern the client as well (`DataParallelClient._join`).
JOINS: dict[str, Callable[[Answers], Any]] = {
    "stats": _same,
    "ping": _same,
    "check": _same,
    "drain": _same,
    "load_adapter": _same,
    "drop_adapter": _same,
    "pin_adapter": _all,
    "reset_prefix_cache": _all,
    "workers": _one_behind_the_other,
    "look": _views,
    "life": _life,
    "profile": _files,
    "record": _files,
}


def check_question(method: str) -> None:
    """Raises InputError for what only one core can be asked, before any is."""
    if method == "worker":
        raise InputError(
            "the first worker of several cores (data_parallel_size) is nobody in particular: ask all (collective_rpc)",
            "method",
        )
    if method not in JOINS:
        raise InputError(f"the engine has no utility {method!r} (it has: {', '.join(JOINS)})", "method")
