"""One process of `benchmarks.gpu`: start an engine, run the tests named, print a ROW a figure.

T1, T1b, T4 clock one `generate` call, requests handed over included, at temperature 0.6. T2 and T3 are greedy. FACTS
say what the last T1 consisted of: of steps with prompt tokens, and of others by their rows, how many and their seconds.
T2 is (a run of 256 tokens less a run of 1 token on other prompts) / 255, median of three.
"steps=1,2,…" is the same for these batches with 64-token prompts and 128 or 48 tokens each, the better of two runs.
T3 is the median of five calls (three for the large one). All requests ignore the end token.
With several ranks a row's case begins with how they share the model: "tp=2,", "pp=2,", "cp=2,", "tp=2,pp=2,", or
"ep=2," where they have whole experts, "dp=2," where each has all. Floors are then those of as many GPUs, but for a
step's time in stages, which are one behind the other, and in copies. "T2=1,16" is T2 of these batches alone;
"T2@32768=1,8" the time of a step after prompts of so many tokens, which both runs find in the prefix cache;
"T3@131000" T3 of one prompt of so many tokens alone.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import chip, workloads
from benchmarks.results_file import Row

FACT_NAMES = ("device", "num_blocks", "max_model_len", "attention_backend", "phases", "kv_bytes", "notes")

ROWS = (8, 16, 32, 64, 128, 192, 256, 1024)  # up to so many, steps count together
OF_8_BITS = ("fp8", "int8")  # whose products are; of other codes both sides have 16 when they meet


class Bench:
    def __init__(self, model: str, options: dict[str, object]) -> None:
        from quire import LLM

        self.model = model
        width, stages, contexts, copies = (
            int(options.get(f"{kind}_parallel_size", 1))  # type: ignore[call-overload]
            for kind in ("tensor", "pipeline", "prefill_context", "data")
        )
        self.ranks = width * stages * contexts * copies
        self.ranks_of_a_step = width
        experts = "ep" if options.get("enable_expert_parallel") else "tp"
        parts = {experts: width, "pp": stages, "cp": contexts, "dp": copies}
        self.layout = "".join(f"{kind}={count}," for kind, count in parts.items() if count > 1)
        folder = workloads.write_model_dir(model, Path(tempfile.mkdtemp()) / model)
        if (quantization := workloads.quantization_of(model)) is not None:
            options = {**options, "quantization": quantization}
        kept = {
            "kv_cache_dtype": workloads.kv_cache_dtype_of(model),
            "mamba_ssm_cache_dtype": workloads.state_dtype_of(model),
        }
        options = {**kept, **options}
        self.llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options)
        self.composition: dict[str, tuple[int, float]] = {}
        self.chip = chip.at_hand()  # asks torch, which a start has imported by now: T6 is that of a user's program

    def emit(self, test: str, case: str, metric: str, value: float, unit: str, floor: float | None = None) -> None:
        if self.ranks > 1:  # ranks share bytes and operations
            case, one_by_one = f"{self.layout}{case}", metric == "step_ms"
            if floor and metric.endswith(("ms", "seconds")):
                floor /= self.ranks_of_a_step if one_by_one else self.ranks
            elif floor:
                floor *= self.ranks
        row = Row(test, self.model, case, metric, round(value, 4), unit, floor and round(floor, 4))
        print("ROW " + json.dumps(row.__dict__), flush=True)

    def floor(self, requests: list[workloads.Request], shared: int = 0) -> float | None:
        """Seconds."""
        sizes = [(len(ids), out) for ids, out in requests]
        if self.chip is None:
            return None
        return workloads.seconds_floor(self.model, sizes, self.chip.copy_bytes_per_s, self.flops(self.chip), shared)

    def flops(self, of: chip.Chip) -> float:
        """A second; matrix units that take 8 bits do twice as many."""
        return of.matmul_flops * (2 if workloads.quantization_of(self.model) in OF_8_BITS else 1)

    def step_floor(self, batch: int, context: int) -> float | None:
        """Milliseconds."""
        moved = sum(workloads.decode_bytes(self.model, batch, context))
        return None if self.chip is None else moved / self.chip.copy_bytes_per_s * 1e3

    def emit_rate(self, test: str, case: str, requests: list[workloads.Request], seconds: float) -> None:
        tokens, floor = sum(out for _, out in requests), self.floor(requests)
        self.emit(test, case, "output_tok_s", tokens / seconds, "tok/s", floor and tokens / floor)

    def generate(self, requests: list[workloads.Request], temperature: float) -> float:
        """Seconds of one call that must return every token asked for."""
        from quire import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [
            SamplingParams(temperature=temperature, max_tokens=out, ignore_eos=True, detokenize=False)
            for _, out in requests
        ]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == [out for _, out in requests], "an output is shorter or longer than asked for"
        return seconds

    def t1(self) -> None:
        for round_ in (0, 1):
            requests, began = workloads.t1(round_), time.time()
            seconds = self.generate(requests, 0.6)
            self.emit_rate("T1", f"round={round_}", requests, seconds)
            self.composition = composition(self.llm.call("look", began, 0.0))

    def t1b(self) -> None:
        requests = workloads.t1b()
        seconds = self.generate(requests, 0.6)
        self.emit_rate("T1b", "", requests, seconds)

    def steps(self, batches: str) -> None:
        """Decode steps of any number of rows: less exact than T2, and quick."""
        for batch in map(int, batches.split(",")):
            count, times = (128 if batch <= 256 else 48), []
            for round_ in range(2):
                one = self.generate(workloads.steps(batch, 1, 100 + round_), 0.0)
                times.append((self.generate(workloads.steps(batch, count, round_), 0.0) - one) / (count - 1) * 1e3)
            floor = self.step_floor(batch, 64 + count // 2)
            self.emit("steps", f"batch={batch}", "step_ms", min(times), "ms", floor)

    def t2(self, batches: str = "") -> None:
        for batch in map(int, batches.split(",")) if batches else workloads.T2_BATCHES:
            steps = []
            for round_ in range(3):
                short = [(ids, 1) for ids, _ in workloads.t2(batch, 100 + round_)]
                one = self.generate(short, 0.0)
                steps.append((self.generate(workloads.t2(batch, round_), 0.0) - one) / 255 * 1e3)
            self.emit("T2", f"batch={batch}", "step_ms", statistics.median(steps), "ms", self.step_floor(batch, 256))

    def t2_at(self, context: int, batches: str) -> None:
        for batch in map(int, batches.split(",")):
            self.generate(workloads.at(context, batch, 1), 0.0)  # fills the prefix cache
            times, count = [], 65
            for _ in range(3):
                one = self.generate(workloads.at(context, batch, 1), 0.0)
                times.append((self.generate(workloads.at(context, batch, count), 0.0) - one) / (count - 1) * 1e3)
            floor = self.step_floor(batch, context + count // 2)
            self.emit("T2", f"context={context},batch={batch}", "step_ms", statistics.median(times), "ms", floor)

    def t3(self, one: int = 0) -> None:
        """one: the length of the only prompt."""
        cases = [(length, 1, 5) for length in workloads.T3_LENGTHS] + [(workloads.T3_MANY[1], workloads.T3_MANY[0], 3)]
        cases = [(one, 1, 3)] if one else cases
        for length, count, repeats in cases:
            times = [self.generate(workloads.t3(length, count, r), 0.0) for r in range(repeats)]
            seconds = statistics.median(times)
            floor = self.chip and workloads.prefill_flops(self.model, count, length) / self.flops(self.chip)
            case = f"{count}x{length}"
            self.emit("T3", case, "ttft_ms", seconds * 1e3, "ms", floor and floor * 1e3)
            self.emit("T3", case, "prefill_tok_s", count * length / seconds, "tok/s", floor and count * length / floor)

    def t4(self) -> None:
        for round_ in (0, 1):
            requests = workloads.t4(round_)
            self.emit("T4", f"round={round_}", "seconds", self.generate(requests, 0.6), "s", self.floor(requests, 4096))

    def run(self, test: str) -> None:
        name, _, case = test.partition("=")
        if name == "T6":
            self.generate([(list(range(1000, 1016)), 1)], 0.0)
            seconds = time.time() - float(os.environ["BENCH_STARTED"])
            self.emit("T6", case, "first_token_s", seconds, "s")
            return
        self.generate(workloads.warmup(), 0.0)
        if name == "steps":
            self.steps(case)
            return
        if name.startswith("T3@"):
            self.t3(int(name[3:]))
            return
        if name.startswith("T2@"):
            self.t2_at(int(name[3:]), case)
            return
        if name == "T2":
            self.t2(case)
            return
        {"T1": self.t1, "T1b": self.t1b, "T3": self.t3, "T4": self.t4}[name]()


def composition(views: list[list[Any]]) -> dict[str, tuple[int, float]]:
    """views: of cores, `EngineView` as plain data. Steps of a kind, and their seconds, gaps before them included."""
    import msgspec

    from quire.types.view import EngineView

    found: dict[str, tuple[int, float]] = {}
    for step in (step for view in views for step in msgspec.convert(view, EngineView).steps):
        rows = next((most for most in ROWS if step.decodes <= most), step.decodes)
        kind = "prompts" if step.prompt_tokens else f"rows<={rows}"
        count, seconds = found.get(kind, (0, 0.0))
        found[kind] = count + 1, round(seconds + step.seconds + step.gap, 6)
    return found


def main() -> None:
    model, options, *tests = sys.argv[1:]
    bench = Bench(model, json.loads(options))
    for test in tests:
        bench.run(test)
    report = bench.llm.info.report
    facts = {name: getattr(report, name) for name in FACT_NAMES} | {"T1 steps": bench.composition}
    print("FACTS " + json.dumps(facts), flush=True)
    print("STATS " + json.dumps(bench.llm.call("stats")["phase_seconds"]), flush=True)
    bench.llm.shutdown()


if __name__ == "__main__":
    main()
