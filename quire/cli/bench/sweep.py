"""quire bench sweep: the same load at several rates, or with several requests at once: a curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.cli import options
from quire.cli.bench.client import ServeBenchConfig, Timing
from quire.cli.bench.report import ReportConfig, publish
from quire.cli.bench.serve import fail_if_any, mean_of, measure
from quire.cli.bench.workload import WorkloadConfig
from quire.foundation.errors import ConfigError

SHOWN = ("output_throughput", "request_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    rates: list[float] = field(default_factory=list)
    """Requests a second, one point of the curve each."""
    concurrencies: list[int] = field(default_factory=list)
    """Requests in flight, one point of the curve each."""
    plot: str | None = None
    """File for the curve: .png, .svg or .html."""


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "bench sweep",
        "Load a server at several rates (--rates 1 2 4) or with several requests at once (--concurrencies 1 4 16).",
        arguments,
        (SweepConfig, ServeBenchConfig, WorkloadConfig, ReportConfig),
    )
    report = options.section_of(ReportConfig, values)
    sweep = options.section_of(SweepConfig, values)
    if bool(sweep.rates) == bool(sweep.concurrencies):
        raise ConfigError("a sweep needs either rates or concurrencies", "rates")
    if sweep.plot is not None:
        from quire.cli.bench.plot import check_plot

        check_plot(sweep.plot)
    settings, workload = options.section_of(ServeBenchConfig, values), options.section_of(WorkloadConfig, values)
    axis, places = ("request_rate", sweep.rates) if sweep.rates else ("max_concurrency", sweep.concurrencies)
    points: list[dict[str, Any]] = []
    everything: list[Timing] = []
    print(f"{axis:>16}" + "".join(f"{name:>20}" for name in SHOWN))
    for place in places:
        runs, timings = measure(dataclasses.replace(settings, **{axis: place}), workload)
        everything += timings
        numbers = mean_of(runs)
        points.append({axis: place, **numbers, "runs": runs})
        print(f"{place:>16g}" + "".join(f"{numbers.get(name, 0.0):>20,.4g}" for name in SHOWN), flush=True)
    model = points[-1]["model_id"]
    publish(f"Sweep of {model}", {}, report, options=values, axis=axis, points=points)
    if sweep.plot is not None:
        from quire.cli.bench.plot import draw

        draw({model: {"axis": axis, "points": points}}, Path(sweep.plot))
    return fail_if_any(everything)
