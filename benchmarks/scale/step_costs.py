"""Step costs for `quire simulate`, from results of benchmarks.gpu (T2, T3) and of a layer's kernels; and how far what
is simulated from them is from what was measured (T1, T1b, T4, which the costs do not know).

    python -m benchmarks.scale.step_costs RESULTS.json [--layers KERNELS.json] [--model llama-3.1-8b] [--write]

T2 gives decode steps of 1, 8 and 64 rows; a layer's kernels those of more rows; T3 what prompt tokens cost and what
attention adds; reading a token of context costs its bytes over the memory's measured bandwidth (--bandwidth, TB/s).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import workloads
from quire.simulation.costs import FOLDER, StepCosts
from quire.simulation.run import simulate
from quire.simulation.trace import Line, request_of
from quire.types.request import EngineRequest

CONTEXT = 256  # tokens of a row of T2 on average, and of the kernels' rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--layers", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--bandwidth", type=float, default=4.0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    costs = fit(results, arguments)
    for name, measured, simulated, unit in compared(results, costs):
        print(
            f"{name:4s} measured {measured:10.2f} {unit}, simulated {simulated:10.2f}: {simulated / measured - 1:+.1%}"
        )
    if arguments.write:
        path = FOLDER / f"{costs.device.split()[-1].lower()}-{costs.model}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")
        print(path)


def values(results: dict[str, Any], test: str, model: str, metric: str) -> dict[str, float]:
    """By case; of a case that was measured several times the median."""
    found: dict[str, list[float]] = {}
    for row in results["rows"]:
        if (row["test"], row["model"], row["metric"]) == (test, model, metric):
            found.setdefault(row["case"], []).append(row["value"])
    return {case: statistics.median(each) for case, each in found.items()}


def fit(results: dict[str, Any], arguments: argparse.Namespace) -> StepCosts:
    model, config = arguments.model, workloads.MODELS[arguments.model]
    decode = {int(case.split("=")[-1]): ms for case, ms in values(results, "T2", model, "step_ms").items()}
    if arguments.layers:
        rows = values(json.loads(arguments.layers.read_text()), "kernel", model, "us")
        layer = {
            int(case.split(", ")[1].split()[0]): us for case, us in rows.items() if case.startswith("decoder layer")
        }
        most = max(decode)
        more = {n: config["num_hidden_layers"] * (us - layer[most]) / 1000 for n, us in layer.items() if n > most}
        decode |= {n: decode[most] + ms for n, ms in more.items()}
    prompt_us, pair_ns = fit_prompts(values(results, "T3", model, "ttft_ms"))
    kv_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    settings = results["settings"][model]
    return StepCosts(
        device=results["device"], model=model, tensor_parallel_size=1, source=arguments.results.name,
        decode_ms=sorted(decode.items()), context=CONTEXT, context_ns=kv_bytes / arguments.bandwidth / 1000,
        prompt_us=prompt_us, pair_ns=pair_ns, num_blocks=settings["num_blocks"],
        max_model_len=settings["max_model_len"],
    )  # fmt: skip


def fit_prompts(times: dict[str, float]) -> tuple[float, float]:
    """Microseconds of a prompt token, nanoseconds of a pair; least squares of the relative errors."""
    lines, ones = [], []
    for case, ms in times.items():
        count, length = map(int, case.split("x"))
        lines.append([count * length / 1e3 / ms, count * length * length / 2 / 1e6 / ms])
        ones.append(1.0)
    (prompt_us, pair_ns), *_ = np.linalg.lstsq(np.array(lines), np.array(ones), rcond=None)
    return float(prompt_us), float(max(0.0, pair_ns))


def requests(given: list[workloads.Request]) -> list[EngineRequest]:
    return [request_of(Line(out, prompt=ids), number) for number, (ids, out) in enumerate(given)]


def compared(results: dict[str, Any], costs: StepCosts) -> list[tuple[str, float, float, str]]:
    """(test, measured, simulated, unit) of what both are known of."""
    found = []
    for name, make in (("T1", workloads.t1), ("T1b", workloads.t1b)):
        if rates := values(results, name, costs.model, "output_tok_s"):
            rate = simulate(requests(make()), costs).output_tokens_per_second
            found.append((name, statistics.median(rates.values()), rate, "tok/s"))
    if seconds := values(results, "T4", costs.model, "seconds"):
        found.append(
            ("T4", statistics.median(seconds.values()), simulate(requests(workloads.t4()), costs).seconds, "s")
        )
    return found


if __name__ == "__main__":
    main()
