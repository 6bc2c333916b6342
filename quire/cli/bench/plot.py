"""quire bench plot: curves of latency over throughput, of one sweep or several, as PNG, SVG or HTML."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli import options
from quire.cli.bench.report import check_target, read_results
from quire.foundation.errors import ConfigError

KINDS = (".png", ".svg", ".html")
PANELS = (("ttft", "first token, ms"), ("itl", "gap between tokens, ms"), ("e2el", "whole answer, ms"))


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    results: list[str]
    """Files that `quire bench sweep --output-json` has written."""
    output: str = "sweep.png"
    """File for the curves: .png, .svg or .html."""


def run(arguments: Sequence[str]) -> int:
    values = options.parse("bench plot", "Draw the curves of sweeps.", arguments, (PlotConfig,))
    check_plot(values["output"])
    sweeps = {}
    for name in values["results"]:
        found = read_results(name)
        if "points" not in found:
            raise ConfigError(f"{name} is no sweep: it has no points", "results")
        sweeps[Path(name).stem] = found
    if not sweeps:
        raise ConfigError("results: name at least one file", "results")
    draw(sweeps, Path(values["output"]))
    return 0


def check_plot(name: str) -> None:
    """Raises ConfigError, before anything is measured, if no curve could be written."""
    if Path(name).suffix not in KINDS:
        raise ConfigError(f"a plot must end in {', '.join(KINDS)}, got {name!r}", "plot")
    check_target(name, "plot")
    import matplotlib  # noqa: F401  what is missing is told now


def draw(sweeps: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """One panel for each latency: median drawn, 99th percentile dashed, over tokens a second."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, (name, label) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for number, (title, sweep) in enumerate(sweeps.items()):
            points = [point for point in sweep["points"] if f"p50_{name}_ms" in point]
            throughput = [point["output_throughput"] for point in points]
            for percentile, style in (("p50", "-"), ("p99", "--")):
                values = [point[f"{percentile}_{name}_ms"] for point in points]
                axes.plot(throughput, values, style, marker="o", color=f"C{number}", label=f"{title} {percentile}")
            for point, x in zip(points, throughput, strict=True):
                axes.annotate(f"{point[sweep['axis']]:g}", (x, point[f"p50_{name}_ms"]), fontsize=7)
        axes.set(xlabel="output tokens a second", ylabel=label, ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
    if target.suffix != ".html":
        figure.savefig(target, dpi=120)
    else:
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        target.write_text(_page(drawn.getvalue(), sweeps), encoding="utf-8")
    print(f"  curves in {target}")


def _page(svg: str, sweeps: Mapping[str, Mapping[str, Any]]) -> str:
    """The curves, the numbers below them, and the commands that measured them: one file without outside parts."""
    parts = [svg[svg.index("<svg") :]]
    for title, sweep in sweeps.items():
        columns = [name for name, value in sweep["points"][0].items() if isinstance(value, int | float)]
        rows = [[f"{point.get(name, ''):,.5g}" for name in columns] for point in sweep["points"]]
        head = "".join(f"<th>{html.escape(name)}" for name in columns)
        body = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows)
        command = html.escape(json.dumps(sweep.get("command", "")))
        parts.append(f"<h2>{html.escape(title)}</h2><p><code>{command}</code></p><table><tr>{head}{body}</table>")
    style = (
        "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:right}"
    )
    return f'<!doctype html><meta charset="utf-8"><title>Sweep</title><style>{style}</style>' + "\n".join(parts) + "\n"
