"""What `quire simulate` foretells of every run on H200s that it can model, against what was measured.

    python -m benchmarks.scale.compared [--models llama-3.1-8b ...] [--tests T1 T1b T4 ...] [--files PART] [--write]

Costs are fitted to T2 and T3 of one rank alone (benchmarks/scale/step_costs.py), of the same file or of the one that
was measured nearest in time: none of what is listed here is among them. Kernels change, so a run whose costs would be
of another day is left out, by name, as is what cannot be modelled. --write puts the table into docs/scaling.md.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results_file, serve, serve_load, workloads
from benchmarks.long_prompt import ALONE
from benchmarks.long_prompt import PROMPT as STREAM_PROMPT
from benchmarks.scale import step_costs
from quire.simulation.core import SimulatedCore
from quire.simulation.costs import StepCosts
from quire.simulation.run import simulate
from quire.simulation.trace import Line, request_of

# The first engine that reads common beginnings once, as the simulated one does: when it was measured.
FIRST = "2026-11-21T16:47"
APART = timedelta(days=1)  # at most, of a run and what its costs are fitted to
TESTS = ("T1", "T1b", "T2", "T4", "T5", "LP")
DOCS = Path(__file__).parents[2] / "docs" / "scaling.md"
MARKS = "<!-- compared: begin -->", "<!-- compared: end -->"
NOT_MODELLED = {"nemotron-h-8b"}  # layers with a state: the simulated cache has pages alone
# Of a server, those that are simulated and those that change nothing where no request is refused.
SERVER_OPTIONS = {"--data-parallel-size", "--tensor-parallel-size", "--api-server-count", "--max-queue-seconds"}
SEEN_MODELS, SEEN_TESTS = ("qwen3-0.6b", "llama-3.1-8b"), ("T1", "T1b", "T4", "T5")
TOLERANCE = 0.1
TICK = 0.001  # seconds, less than any step


class Figure(NamedTuple):
    file: str
    model: str
    test: str
    case: str
    metric: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def is_held_out(self) -> bool:
        """Nothing that costs are made of was chosen for its sake."""
        return not (self.model in SEEN_MODELS and (self.test in SEEN_TESTS or self.case.startswith("tp=")))

    def line(self) -> str:
        what = " ".join(filter(None, (self.test, self.case, self.metric)))
        values = f"{self.measured:10.2f} {self.simulated:10.2f} {self.error:+7.1%}"
        return f"{self.file[:18]:18s} {self.model:18s} {what:32s} {values}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--tests", nargs="+", default=TESTS, choices=TESTS)
    parser.add_argument("--files", default="", help="part of the names of files to look at")
    parser.add_argument("--write", action="store_true", help="the table into docs/scaling.md")
    arguments = parser.parse_args()
    figures = []
    for figure in compared(arguments.files, arguments.models, arguments.tests):
        print(figure.line(), flush=True)
        figures.append(figure)
    print(summary(figures))
    if arguments.write:
        write_table(figures)


def compared(files: str = "", models: Sequence[str] | None = None, tests: Sequence[str] = TESTS) -> Iterator[Figure]:
    """files: part of the names of those looked at. models: None: all."""
    for path in sorted(results_file.FOLDER.glob("*nvidia-h200*.json")):
        results = step_costs.read(path.name)
        if files not in path.name or results.get("date", "") < FIRST:
            continue
        found = {row["model"] for row in results["rows"] if row.get("test") in tests}
        for model in sorted(found & set(models or found) - NOT_MODELLED):
            for test in tests:
                yield from FIGURES[test](path.name, model, results)


def _costs(file: str, model: str, test: str, ranks: int = 1) -> StepCosts | None:
    """Of a run's own time. None: nobody knows them, which is said."""
    if reason := _unknown(file, model, ranks):
        print(f"left out: {file} {model} {test}{f' tp={ranks}' if ranks > 1 else ''}: {reason}", flush=True)
        return None
    return step_costs.fit(file, model, step_costs.date(file)).shared_by(ranks)


def _unknown(file: str, model: str, ranks: int) -> str:
    """Why the costs of a run are not known; nothing if they are."""
    at = step_costs.date(file)
    found = step_costs.sources(file, model, at)
    if not step_costs.is_plain(step_costs.read(file)):
        return "its engines had other options"
    if found is None:
        return "no file has decode steps of one GPU"
    if ranks > 1 and ranks not in found.sums:
        return f"no file has sums over {ranks} ranks"
    needed = filter(None, (found.steps, found.prompts, found.sums[ranks] if ranks > 1 else None))
    far = [name for name in needed if abs(step_costs.date(name) - at) > APART]
    return f"what it lacks was measured on another day ({', '.join(far)})" if far else ""


def summary(figures: Sequence[Figure]) -> str:
    """Of all, and of those held out."""
    held_out = [figure for figure in figures if figure.is_held_out]
    return _summary(figures) + (f"; held out: {_summary(held_out)}" if held_out else "")


def _summary(figures: Sequence[Figure]) -> str:
    errors = [abs(figure.error) for figure in figures]
    within = sum(error <= TOLERANCE for error in errors)
    return (
        f"{len(errors)} figures, {within} within {TOLERANCE:.0%}; error in the median {statistics.median(errors):.1%}, "
        f"at most {max(errors):.1%}"
    )


def _medians(file: str, model: str, results: dict[str, Any], test: str, metric: str) -> dict[tuple[int, str], float]:
    """By ranks and by what of the case is no round. Other layouts, and variants of a kernel or of a commit, are not the
    engine that is simulated."""
    found: dict[tuple[int, str], list[float]] = {}
    for case, value in step_costs.values(results, test, model, metric).items():
        if "commit=" in case or "library" in case or re.match("(pp|ep|dp|cp)=", case):
            print(f"left out: {file} {model} {test} {case}: not modelled", flush=True)
            continue
        ranks = re.match(r"tp=(\d+),", case)
        rest = case.removeprefix(ranks[0]) if ranks else case
        key = int(ranks[1]) if ranks else 1, "" if rest.startswith("round=") else rest
        found.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def _workload(test: str, metric: str, make: Callable[[], list[workloads.Request]]) -> Callable[..., Iterator[Figure]]:
    def figures(file: str, model: str, results: dict[str, Any]) -> Iterator[Figure]:
        for (ranks, _), measured in _medians(file, model, results, test, metric).items():
            if (costs := _costs(file, model, test, ranks)) is None:
                continue
            found = simulate(step_costs.requests(make()), costs, together=True)
            value = found.seconds if metric == "seconds" else found.output_tokens_per_second
            yield Figure(file, model, test, f"tp={ranks}" if ranks > 1 else "", metric, measured, value)

    return figures


def _steps(file: str, model: str, results: dict[str, Any]) -> Iterator[Figure]:
    """Of one rank costs are fitted to these."""
    for (ranks, case), measured in _medians(file, model, results, "T2", "step_ms").items():
        if ranks > 1 and (costs := _costs(file, model, "T2", ranks)) is not None:
            batch = int(case.removeprefix("batch="))
            given = workloads.t2(batch)
            seconds = [
                simulate(step_costs.requests([(ids, out) for ids, _ in given]), costs, together=True).seconds
                for out in (1, 256)
            ]
            step_ms = (seconds[1] - seconds[0]) / 255 * 1e3
            yield Figure(file, model, "T2", f"tp={ranks} {case}", "step_ms", measured, step_ms)


def _served(file: str, model: str, results: dict[str, Any]) -> Iterator[Figure]:
    measured: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        if (row["test"], row["model"]) == ("T5", model):
            measured.setdefault(row["case"], {})[row["metric"]] = row["value"]
    for case, figures in measured.items():
        layout, _, rate = case.rpartition("rate=")
        sizes = {kind: int(size) for kind, size in re.findall(r"(\w+)=(\d+),", layout)}
        command = _command(results["settings"], layout)
        if command is None or figures["failed"]:
            reason = "its requests failed" if command else "no command that is modelled"
            print(f"left out: {file} {model} T5 {case}: {reason}", flush=True)
            continue
        if (costs := _costs(file, model, "T5", sizes.get("tp", 1))) is None:
            continue
        given = workloads.t5(float(rate), *command)
        asked = [request_of(Line(out, arrival=at, prompt=ids), i) for i, (at, ids, out) in enumerate(given)]
        found = simulate(asked, costs, sizes.get("dp", 1))
        for metric, value in (
            ("output_tok_s", found.output_tokens_per_second),
            ("ttft_p50_ms", found.first_token.p50),
            ("ttft_p99_ms", found.first_token.p99),
            ("mean_p50_ms", found.token_gap.p50),
            ("mean_p99_ms", found.token_gap.p99),
        ):
            yield Figure(file, model, "T5", case.replace(",", " "), metric, figures[metric], value)


def _command(settings: dict[str, Any], layout: str) -> tuple[float, int] | None:
    """Seconds of sending and requests at once of the command that measured a layout; where several wrote a file, the
    settings of each have a name behind them. None: there is none that is modelled."""
    for key, options in settings.items():
        name, _, which = key.partition(" ")
        words = shlex.split(options) if name == "options" else []
        is_modelled = {word for word in words if word.startswith("--")} <= SERVER_OPTIONS
        if name == "options" and serve.layout(words) == layout and is_modelled:
            return settings[f"seconds {which}".strip()], settings[f"requests_at_once {which}".strip()]
    return None


def _long_prompt(file: str, model: str, results: dict[str, Any]) -> Iterator[Figure]:
    """Streams, and a long prompt beside them."""
    settings = results["settings"]
    measured = step_costs.values(results, "LP", model, "ttft_s")
    if not measured or results["date"] < "2026-11-22T16:50:40":  # steps keep another pace since
        return
    if (costs := _costs(file, model, "LP")) is None:
        return
    core, times = SimulatedCore(costs), list[float]()
    streams = [Line(20_000, prompt_tokens=STREAM_PROMPT) for _ in range(settings["streams"])]
    long = Line(1, arrival=ALONE, prompt_tokens=settings["prompt"])
    for number, line in enumerate([*streams, long]):
        core.add(request_of(line, number))
    last = core.times[str(len(streams))]
    while not last.num_tokens:
        core.run_until(core.now + TICK)
        times.append(core.now)
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times) if b > ALONE]
    yield Figure(file, model, "LP", "", "ttft_s", statistics.median(measured.values()), last.first - last.arrival)
    for share in (50, 99):
        metric = f"beside_gap_p{share}_ms"
        value = statistics.median(step_costs.values(results, "LP", model, metric).values())
        yield Figure(file, model, "LP", "", metric, value, serve_load.percentile(gaps, share))


FIGURES: dict[str, Callable[[str, str, dict[str, Any]], Iterator[Figure]]] = {
    "T1": _workload("T1", "output_tok_s", workloads.t1),
    "T1b": _workload("T1b", "output_tok_s", workloads.t1b),
    "T2": _steps,
    "T4": _workload("T4", "seconds", workloads.t4),
    "T5": _served,
    "LP": _long_prompt,
}


def write_table(figures: Sequence[Figure]) -> None:
    """Between the marks in docs/scaling.md."""
    begin, end = MARKS
    before, _, rest = DOCS.read_text().partition(begin)
    DOCS.write_text(f"{before}{begin}\n{table(figures)}\n{end}{rest.partition(end)[2]}")


def table(figures: Iterable[Figure]) -> str:
    """A line a model and metric: what several files have of it as the range of its errors."""
    groups: dict[tuple[str, ...], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.model, figure.test, figure.case, figure.metric), []).append(figure)
    lines = ["| model | test | figure | runs | measured | simulated | error |", "|---|---|---|---|---|---|---|"]
    for (model, test, case, metric), each in sorted(groups.items()):
        measured, simulated = (statistics.median(getattr(f, name) for f in each) for name in ("measured", "simulated"))
        errors = sorted(f.error for f in each)
        spread = f"{errors[0]:+.1%}" if len(errors) == 1 else f"{errors[0]:+.1%} … {errors[-1]:+.1%}"
        if max(map(abs, errors)) > TOLERANCE:
            spread = f"**{spread}**"
        what = f"{case} {metric}".strip()
        lines.append(
            f"| {model} | {test} | {what} | {len(each)} | {_short(measured)} | {_short(simulated)} | {spread} |"
        )
    return "\n".join([*lines, "", f"{summary([f for each in groups.values() for f in each])}."])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
