"""quire bench compare: what differs between two results, and whether it is more than the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cli import options
from quire.cli.bench.report import read_results
from quire.foundation.errors import ConfigError

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the normal distribution's is near.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
T95_MANY = 2.0
UNLIKE = ("model_id", "num_prompts", "total_input_tokens", "total_output_tokens", "completed", "failed")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    before: str
    """A result of `quire bench serve` or `sweep` (--output-json), best of several repeats (--repeats 3)."""
    after: str
    """The other one."""


@dataclass(frozen=True)
class Difference:
    name: str
    before: float
    after: float
    noise: float | None
    """Half of the 95 % interval of the difference, as a share of `before`; None: a result has one run alone."""

    @property
    def change(self) -> float:
        return self.after / self.before - 1 if self.before else math.nan

    @property
    def verdict(self) -> str:
        if self.noise is None:
            return "noise unknown"
        if abs(self.change) <= self.noise:
            return "within noise"
        is_better = (self.change > 0) == ("throughput" in self.name or "goodput" in self.name)
        return "better" if is_better else "WORSE"


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "bench compare", "Two results beside each other.", arguments, (CompareConfig,), positional=("before", "after")
    )
    before, after = read_results(values["before"]), read_results(values["after"])
    for title, one, other in _pairs(before, after):
        print(title)
        for name in UNLIKE:
            if one.get(name) != other.get(name):
                print(f"  not alike: {name} {one.get(name)} and {other.get(name)}")
        for found in differences(one, other):
            noise = "" if found.noise is None else f" ± {found.noise:.1%}"
            change = f"{found.change:+.1%}{noise}"
            print(f"  {found.name:<26} {found.before:>12,.4g} {found.after:>12,.4g}  {change:<18} {found.verdict}")
    if "noise unknown" in {found.verdict for _, a, b in _pairs(before, after) for found in differences(a, b)}:
        print("The noise is known with --repeats 3 or more on both sides.")
    return 0


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Of rates and of times, whose names both have."""
    names = [
        name
        for name, value in before.items()
        if isinstance(value, float)
        and isinstance(after.get(name), float)
        and name != "duration"
        and not name.startswith("std_")
    ]
    return [_difference(name, before, after) for name in names]


def _difference(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Welch's interval of the difference of two means."""
    one, other = ([run[name] for run in side.get("runs", [side]) if name in run] for side in (before, after))
    mean, new = float(np.mean(one)), float(np.mean(other))
    if min(len(one), len(other)) < 2 or not mean:
        return Difference(name, mean, new, None)
    a, b = np.var(one, ddof=1) / len(one), np.var(other, ddof=1) / len(other)
    if a + b == 0:
        return Difference(name, mean, new, 0.0)
    freedom = int((a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1)))
    t = T95[freedom - 1] if freedom <= len(T95) else T95_MANY
    return Difference(name, mean, new, float(t * math.sqrt(a + b) / mean))


def _pairs(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """What can be compared: two runs, or the points that two sweeps have in common. Raises ConfigError for none."""
    if ("points" in before) != ("points" in after) or before.get("axis") != after.get("axis"):
        raise ConfigError("one result is a sweep and the other is none, or they sweep different things", "after")
    if "points" not in before:
        return [(str(before.get("model_id", "")), before, after)]
    axis = before["axis"]
    others = {point[axis]: point for point in after["points"]}
    pairs = [(f"{axis} {p[axis]:g}", p, others[p[axis]]) for p in before["points"] if p[axis] in others]
    if not pairs:
        raise ConfigError(f"the two sweeps have no {axis} in common", "after")
    return pairs
