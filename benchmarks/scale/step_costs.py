"""Step costs for `quire simulate`, from a results file of benchmarks.gpu.

    python -m benchmarks.scale.step_costs RESULTS.json [--model llama-3.1-8b] [--write]

What is fitted to the model's own figures: T2 gives decode steps of 1, 8 and 64 rows (a sweep of other batches, where
there is one, those of more), T3 what a prompt token costs and what attention adds. What the file lacks is taken from
the newest other one that has it of the same model; a model whose prompts nobody measured multiplies at the rate of one
like it (`RATES`). All else is of kernels or of the host, and the same for all models; each constant says where it was
measured. Whole workloads (T1, T1b, T4, T5, long prompts, ranks) are nowhere in it: `benchmarks.scale.compared` holds
what is simulated of them against what was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks import chip, workloads
from benchmarks.results_file import FOLDER as RESULTS
from quire.simulation.costs import FOLDER, HostCosts, Sharing, StepCosts
from quire.simulation.run import simulate
from quire.simulation.trace import Line, request_of
from quire.types.kv import PromptCost
from quire.types.request import EngineRequest
from quire.worker.graphs import graph_rows
from quire.worker.mixed_graphs import mixed_sizes

CONTEXT = 256  # tokens of a row of T2 on average
PROCESSORS, LINES = 132, 64  # of an H200; queries of an item of its prompt kernel (kernels/attention/triton)
KV_RATE = chip.H200.copy_bytes_per_s  # decode attention of much context: 3.8 to 4.4 TB/s (…-kernels-decode.json)
SWEEP = "2026-11-22-d3aadfa-nvidia-h200-decode-shapes.json"  # steps of other batches
KV_ROOM = 1.36e11  # bytes of weights and cache on an H200, by the blocks of llama-3.1-8b
HOST = "2026-11-23-adf7d3b-cpu-2-threads-host.json"
# A layer's attention where rows share a beginning takes longer by so many microseconds, and by so many picoseconds a
# row, a token of the beginning and a head: 256 and 64 rows of 4,096 + 100 tokens, less what 100 tokens of each take and
# what attention takes at least (2026-11-21-0f06e99-nvidia-h200-kernels-decode.json; 16 heads and 32 agree).
SHARED_LAYER_US, SHARED_HEAD_PS = 21.5, 1.16
# Operations a second of large steps of models that are like others, in bf16: llama-3.1-8b and qwen3-30b-a3b as fitted.
RATES = {"dense": 6.4e14, "experts": 4.6e14}
FP8_RATE = 1.72  # of that: 8,192 rows of llama's products, scales by rows and columns (H200, 2026-11-22)
# A layer of a step without a graph is launched in: qwen3-30b-a3b computes 1,024 tokens in 19.2 ms for 48 layers (T3).
EAGER_LAYER_MS = 0.38
# Sums over four ranks by today's kernels, which nobody has measured on H200s yet: H100s are linked as fast, but their
# memory is slower, which sums of more than some hundred KiB feel.
SUMS_OF_H100 = "2026-11-26-ad89e0aa-nvidia-h100-80gb-hbm3-sums.json"
# Layers of llama-3.1-8b that two and four ranks share, each without its sums, by rows.
SHARED_LAYERS = {
    2: "2026-11-26-5e3a1b71-nvidia-h200-gemm-sweep.json",
    4: "2026-11-26-f140f2ed-nvidia-h200-gemm-sweep.json",
}
NEWEST = datetime.max.replace(tzinfo=UTC)


class Sources(NamedTuple):
    """Names of the files that costs are made of."""

    steps: str
    prompts: str | None  # None: nobody measured any
    sums: dict[int, str]  # by ranks

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(filter(None, (self.steps, self.prompts, *self.sums.values()))))


class Micro(NamedTuple):
    """What costs are fitted to."""

    decode: dict[int, float]  # milliseconds of a step, by rows
    prompts: dict[str, float]  # T3, milliseconds by COUNTxLENGTH; may be empty
    num_blocks: int
    max_model_len: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--write", action="store_true", help="a file that `quire simulate` knows by name")
    arguments = parser.parse_args()
    costs = fit(arguments.results.name, arguments.model, NEWEST)
    print(msgspec.json.format(msgspec.json.encode(costs), indent=1).decode())
    if arguments.write:
        path = FOLDER / f"{costs.device.split()[-1].lower()}-{costs.model}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")
        print(path)


@cache
def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def values(results: dict[str, Any], test: str, model: str, metric: str) -> dict[str, float]:
    """By case; of a case that was measured several times the median."""
    found: dict[str, list[float]] = {}
    for row in results.get("rows", []):
        if (row.get("test"), row.get("model"), row.get("metric")) == (test, model, metric):
            found.setdefault(row["case"], []).append(row["value"])
    return {case: statistics.median(each) for case, each in found.items()}


@cache
def date(name: str) -> datetime:
    """When a file was measured; the beginning of time if it does not say."""
    found = datetime.fromisoformat(read(name).get("date", str(datetime.min)))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@cache
def fit(name: str, model: str, at: datetime) -> StepCosts:
    """name: of a file in benchmarks/results. at: what it lacks is taken from the file that was measured nearest to
    then; NEWEST: the newest. There must be steps (`sources`)."""
    found = sources(name, model, at)
    assert found is not None, f"no file has decode steps of {model}"
    micro = _micro(name, model, found, at)
    costs = _unfitted(model, micro, found)
    return fit_prompts(costs, micro.prompts) if micro.prompts else costs


@cache
def sources(name: str, model: str, at: datetime) -> Sources | None:
    """None: no file has decode steps of the model."""
    names = [name, *_files(at)]
    steps = next((each for each in names if _steps(each, model)), None)
    prompts = next((each for each in names if _prompts(each, model)), None)
    sums: dict[int, str] = {}
    for each in _by_time(at, [*_names("*nvidia-h200*-sums.json"), SUMS_OF_H100]):
        sums = dict.fromkeys(_sums(each), each) | sums
    return None if steps is None else Sources(steps, prompts, dict(sorted(sums.items())))


def is_plain(results: dict[str, Any]) -> bool:
    """Whether engines had no options but how ranks share them: others are another engine's figures."""
    settings = results.get("settings", {})
    options = [each for key, each in settings.items() if key.startswith("options") and isinstance(each, dict)]
    return all(name.endswith("_parallel_size") for each in options for name in each)


@cache
def _files(at: datetime) -> list[str]:
    """Of H200s, that others may take figures from; those first that were measured nearest to a time."""
    return _by_time(at, [name for name in _names("*nvidia-h200*.json") if is_plain(read(name))])


def _by_time(at: datetime, names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: abs(date(name) - at))


def _names(pattern: str) -> list[str]:
    return sorted(path.name for path in RESULTS.glob(pattern))


def _micro(name: str, model: str, found: Sources, at: datetime) -> Micro:
    prompts = _prompts(found.prompts, model) if found.prompts else {}
    facts = (read(each).get("settings", {}).get(model) for each in [name, *_files(at)])
    of_it = next((each for each in facts if isinstance(each, dict) and "num_blocks" in each), None)
    if of_it is None:
        room = int((KV_ROOM - workloads.decode_bytes(model, 1 << 16, 0)[0]) / (16 * _kv_bytes(model)))
        of_it = {"num_blocks": room, "max_model_len": workloads.config_of(model)["max_position_embeddings"]}
    return Micro(_with_sweep(model, _steps(found.steps, model)), prompts, of_it["num_blocks"], of_it["max_model_len"])


def _with_sweep(model: str, decode: dict[int, float]) -> dict[int, float]:
    """T2, and of other rows a sweep's steps: as much longer as T2 is where both were measured, and by what their fewer
    tokens of context need not be read."""
    sweep = _rows(values(read(SWEEP), "steps", model, "step_ms"))
    read_ms = _kv_bytes(model) / KV_RATE * 1e3
    as_t2 = {}
    for rows, ms in sweep.items():
        seen = 64 + (128 if rows <= 256 else 48) // 2
        as_t2[rows] = ms + rows * (CONTEXT - seen) * read_ms
    both = sorted(decode.keys() & sweep.keys())
    if not both:
        return decode
    differences = [decode[rows] - as_t2[rows] for rows in both]
    graphs = graph_rows(1024, [])
    return {r: ms + float(np.interp(r, both, differences)) for r, ms in as_t2.items() if r in graphs} | decode


def _prompts(name: str, model: str) -> dict[str, float]:
    """T3 of one GPU, of the usual lengths."""
    cases = values(read(name), "T3", model, "ttft_ms")
    count, length = workloads.T3_MANY
    usual = [*(f"1x{one}" for one in workloads.T3_LENGTHS), f"{count}x{length}"]
    return {case: cases[case] for case in usual if case in cases}


def _steps(name: str, model: str) -> dict[int, float]:
    """T2 of one GPU; none unless all batches were measured."""
    found = _rows(values(read(name), "T2", model, "step_ms"))
    return found if found.keys() >= set(workloads.T2_BATCHES) else {}


def _sums(name: str) -> dict[int, list[tuple[int, float]]]:
    """By ranks: bytes of a sum with the residual, and its microseconds as layers call it."""
    found: dict[int, list[tuple[int, float]]] = {}
    for row in read(name)["rows"]:
        if (row["test"], row["metric"]) == ("sums", "ours_us"):
            ranks, rows = (int(part.partition("=")[2]) for part in row["case"].split(","))
            size = rows * 2 * int(row["model"].removeprefix("hidden="))
            found.setdefault(ranks, []).append((size, row["value"]))
    return found


@cache
def _whole_layer_us() -> list[tuple[int, float]]:
    """By rows, what a layer takes each rank beside a share of the rest: w of w + r / ranks, by the fastest way that was
    found for its products (70 billion weights and 8 agree within 10 us)."""
    fastest: dict[int, dict[int, float]] = {}
    for ranks, name in SHARED_LAYERS.items():
        for row in read(name)["rows"]:
            if row["model"] == f"llama-3.1-8b tp={ranks}":
                found = fastest.setdefault(int(row["case"].removeprefix("rows=")), {})
                found[ranks] = min(row["value"], found.get(ranks, row["value"]))
    return [(rows, 2 * us[4] - us[2]) for rows, us in sorted(fastest.items()) if us.keys() == SHARED_LAYERS.keys()]


def _rows(cases: dict[str, float]) -> dict[int, float]:
    return {
        int(case.removeprefix("batch=")): ms
        for case, ms in cases.items()
        if case.startswith("batch=") and "," not in case
    }


def _kv_bytes(model: str) -> float:
    """Of a token, in the layers that read all of them."""
    config = workloads.config_of(model)
    layers = config["num_hidden_layers"]
    if "sliding_window" in config:
        layers //= 2
    kept: int = workloads.attention_of(model)[1]
    return 2.0 * kept * layers


def _unfitted(model: str, micro: Micro, found: Sources) -> StepCosts:
    config, experts = workloads.config_of(model), workloads.experts_of(model)
    layers, hidden, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    layer_weights = workloads.attention_of(model)[0] + workloads.feed_forward(model, 1)
    attention = workloads.attention_of(model)[2] / layer_weights
    kv_heads, group = config["num_key_value_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    is_latent = "kv_lora_rank" in config
    wave = 0 if is_latent or group > LINES else PROCESSORS // min(kv_heads, PROCESSORS) * (2 * LINES // group)
    all_weights = layers * (workloads.attention_of(model)[0] + workloads.feed_forward(model, 1 << 20))
    rate = RATES["experts" if experts else "dense"]
    of_layers = rate * (FP8_RATE if workloads.quantization_of(model) == "fp8" else 1)
    prompt_us = 2 * layers * layer_weights / of_layers * 1e6
    pair_ns = 2 * layers * workloads.attention_of(model)[2] / rate * 1e9
    rows = 1024
    weight_bytes = workloads.decode_bytes(model, 1 << 16, 0)[0]
    kv_bytes = _kv_bytes(model)
    return StepCosts(
        device="NVIDIA H200", model=model, tensor_parallel_size=1, source=str(found),
        decode_ms=sorted(micro.decode.items()), context=CONTEXT, context_ns=kv_bytes / KV_RATE * 1e9,
        prompt_us=prompt_us, pair_ns=pair_ns, num_blocks=micro.num_blocks,
        max_model_len=micro.max_model_len, max_num_seqs=rows,
        head_us=2 * hidden * vocab / rate * 1e6 + 4 * vocab * 2 / KV_RATE * 1e6,
        experts=experts and (experts[0], experts[1]),
        shared_ms=layers * SHARED_LAYER_US / 1e3,
        shared_ns=layers * config["num_attention_heads"] * SHARED_HEAD_PS / 1e3,
        sizes=graph_rows(rows, []),
        mixed_sizes=sorted((size.decodes, size.tokens) for size in mixed_sizes(rows, 16384, int(all_weights), layers)),
        prompt_cost=PromptCost(attention, wave),
        host=HostCosts(**_host(), eager_ms=layers * EAGER_LAYER_MS),
        sharing=Sharing(
            sums=2 * layers, token_bytes=2 * hidden, kv_heads=kv_heads, weight_bytes=weight_bytes,
            block_bytes=int(16 * kv_bytes), sum_us={ranks: _sums(each)[ranks] for ranks, each in found.sums.items()},
            whole_us=[(rows, layers * us) for rows, us in _whole_layer_us()],
        ),
    )  # fmt: skip


def _host() -> dict[str, float]:
    return {row["metric"] if row["metric"] != "us" else row["case"]: row["value"] for row in read(HOST)["rows"]}


def fit_prompts(costs: StepCosts, times: dict[str, float]) -> StepCosts:
    """With the cost of a prompt token and of a pair by which simulated T3 comes closest to the one measured
    (milliseconds by case): least squares of the relative errors, by Gauss and Newton."""
    for _ in range(4):
        errors = _prompt_errors(costs, times)
        columns = []
        for change in ("prompt_us", "pair_ns"):
            other = msgspec.structs.replace(costs, **{change: getattr(costs, change) * 1.01})
            columns.append((_prompt_errors(other, times) - errors) / 0.01)
        (a, b), *_ = np.linalg.lstsq(np.array(columns).T, -errors, rcond=None)
        costs = msgspec.structs.replace(
            costs, prompt_us=costs.prompt_us * float(np.exp(np.clip(a, -0.7, 0.7))),
            pair_ns=costs.pair_ns * float(np.exp(np.clip(b, -0.7, 0.7))),
        )  # fmt: skip
    return costs


def _prompt_errors(costs: StepCosts, times: dict[str, float]) -> np.ndarray:
    return np.array([simulated_prompts(costs, case) / ms - 1 for case, ms in times.items()])


def simulated_prompts(costs: StepCosts, case: str) -> float:
    """Milliseconds of T3."""
    count, length = map(int, case.split("x"))
    lines = [Line(1, prompt_tokens=length, stream=False) for _ in range(count)]
    costs = msgspec.structs.replace(costs, num_blocks=min(costs.num_blocks, 2 + count * (length // 16 + 2)))
    return 1e3 * simulate([request_of(line, i) for i, line in enumerate(lines)], costs, together=True).seconds


def requests(given: list[workloads.Request]) -> list[EngineRequest]:
    return [request_of(Line(out, prompt=ids, stream=False), number) for number, (ids, out) in enumerate(given)]


if __name__ == "__main__":
    main()
