"""quire bench serve: load a running server and time what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cli import options
from quire.cli.bench.client import LoadClient, ServeBenchConfig, Timing
from quire.cli.bench.report import ReportConfig, publish
from quire.cli.bench.workload import WorkloadConfig


@dataclass(frozen=True, kw_only=True)
class DetailConfig:
    save_detailed: bool = False
    """Write the numbers of every request to the JSON file."""


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "bench serve",
        "Send requests to a server that speaks OpenAI's API and time what comes back.",
        arguments,
        (ServeBenchConfig, DetailConfig, WorkloadConfig, ReportConfig),
    )
    report = options.section_of(ReportConfig, values)
    settings = options.section_of(ServeBenchConfig, values)
    runs, timings = measure(settings, options.section_of(WorkloadConfig, values))
    about: dict[str, Any] = {"options": values}
    if len(runs) > 1:
        about["runs"] = runs
    if values["save_detailed"]:
        about["requests"] = [{name: getattr(t, name) for name in Timing.__slots__} for t in timings]
    numbers = mean_of(runs)
    publish(f"Serving {numbers['model_id']}", numbers, report, **about)
    return fail_if_any(timings)


def measure(settings: ServeBenchConfig, workload: WorkloadConfig) -> tuple[list[dict[str, Any]], list[Timing]]:
    """Numbers of each repeat, and of every request."""
    runs, timings = [], []
    for _ in range(settings.repeats):
        numbers, more = asyncio.run(LoadClient(settings, workload).measure())
        runs.append(numbers)
        timings += more
    return runs, timings


def mean_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run of several: counts are those of the last, rates and times the mean of all."""
    if len(runs) == 1:
        return dict(runs[0])
    return {
        name: float(np.mean([run[name] for run in runs if name in run])) if isinstance(value, float) else value
        for name, value in runs[-1].items()
    }


def fail_if_any(timings: Sequence[Timing]) -> int:
    failed = next((t.error for t in timings if t.error), None)
    if failed:
        print(f"  first error: {failed}")
    return 1 if failed else 0
