"""What the host does for requests beside the steps: offline runs around a worker without a model, by phase.

    python -m benchmarks.scale.host_costs [--rounds 15] [--write]

Prompts of two lengths and answers of two tell a request from a token of its prompt, and a step from a row of it; a
common beginning, a token that is computed from one that is found. CPU time, the
least of some rounds: what shares a core makes it slower too. What the step of a real worker is launched in is not
among them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import null_worker, results_file, workloads
from benchmarks.results_file import Row
from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine.in_process import InProcessClient
from quire.observe.profiling import PhaseClock

SHORT, LONG, COUNT, TOKENS = 64, 4096, 256, 128
MODEL = "qwen3-0.6b"  # of which only the vocabulary matters


class CpuClock(PhaseClock):
    """Of this thread's own CPU time: whoever shares the machine is not in it."""

    def begin(self) -> None:
        self._last = time.thread_time()

    def lap(self, phase: str) -> None:
        now = time.thread_time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Bench:
    def __init__(self) -> None:
        os.environ["QUIRE_NULL_RATE"] = "1e12"
        folder = workloads.write_model_dir(MODEL, Path(tempfile.mkdtemp()) / MODEL)
        config = EngineConfig.from_flat(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, disable_log_stats=True, device="cpu",
            max_num_seqs=1024, max_num_batched_tokens=16384,
        )  # fmt: skip
        self.clock = CpuClock()
        self.llm = LLM.from_client(InProcessClient(resolve(config), null_worker.NAME, self.clock), None)
        self._number = 0

    def run(self, count: int, length: int, tokens: int, shared: int = 0) -> tuple[float, float]:
        """Seconds that `count` new prompts take to be handed over, and those of plans and of settling them. shared:
        tokens of a beginning that all have, and that is computed before."""
        self._number += 1
        requests = workloads.t3(length, count, self._number)
        if shared:
            requests = workloads.t4(self._number, count, shared, length - shared, tokens)
            self.llm.generate(
                [{"prompt_token_ids": requests[0][0][:-1]}],
                SamplingParams(max_tokens=1, detokenize=False),
                use_tqdm=False,
            )
        params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True, detokenize=False)
        before, began = dict(self.clock.seconds), time.thread_time()
        self.llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
        seconds = time.thread_time() - began
        phases = ("plan", "submit", "settle", "wait")
        spent = {name: self.clock.seconds[name] - before.get(name, 0.0) for name in phases}
        planned = spent["plan"] + spent["submit"] + spent["settle"]
        return seconds - planned - spent["wait"], planned


def measured(bench: Bench, rounds: int) -> dict[str, float]:
    """Microseconds, by the names of HostCosts."""
    kinds = {
        "short": (COUNT, SHORT, 1), "long": (COUNT, LONG, 1), "few": (8, SHORT, TOKENS + 1),
        "many": (COUNT, SHORT, TOKENS + 1), "few, short": (8, SHORT, 1),
        "found": (COUNT, LONG, 1, LONG - SHORT),
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for round_ in range(rounds + 1):
        for kind, sizes in kinds.items():
            times = bench.run(*sizes)
            if round_:  # the first is slow once
                found[kind].append(times)
    (short, short_plan), (long, long_plan), (_, few), (_, many), (_, few_short), (_, hit_plan) = (
        tuple(1e6 * min(column) for column in zip(*times, strict=True)) for times in found.values()
    )
    tokens = COUNT * (LONG - SHORT)
    prompt_token, admit_token = (long - short) / tokens, (long_plan - short_plan) / tokens
    few_step, many_step = (few - few_short) / TOKENS, (many - short_plan) / TOKENS
    row = (many_step - few_step) / (COUNT - 8)
    return {
        "request_us": short / COUNT - SHORT * prompt_token,
        "prompt_token_us": prompt_token,
        "admit_us": short_plan / COUNT - SHORT * admit_token - row,
        "admit_token_us": admit_token,
        "found_token_us": (hit_plan - short_plan) / tokens,
        "step_us": few_step - 8 * row,
        "row_us": row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="the figures to benchmarks/results")
    arguments = parser.parse_args()
    bench = Bench()
    rows = [Row("host", "", name, "us", round(us, 4), "us") for name, us in measured(bench, arguments.rounds).items()]
    bench.llm.shutdown()
    print(results_file.table(rows))
    if arguments.write:
        command = " ".join(["python -m benchmarks.scale.host_costs", *sys.argv[1:]])
        device = f"cpu-{os.cpu_count()}-threads"
        print(results_file.write(rows, device, command, {"rounds": arguments.rounds}, part="host"))


if __name__ == "__main__":
    main()
