"""Where a step's time on the GPU goes, kernel by kernel, in the whole engine on random weights.

    python -m benchmarks.breakdown --model qwen3-0.6b --cases decode:64x256 prefill:1x1024

decode:ROWSxCONTEXT: mean of 32 steps, (a run of 33 tokens less a run of one) / 32.
prefill:COUNTxLENGTH: one whole call.
Kernels overlap where one is launched before its predecessor has ended: their sum may exceed the wall time.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from benchmarks import workloads
from quire import LLM, SamplingParams

STEPS = 32
SHOWN = 16


class Breakdown:
    def __init__(self, model: str) -> None:
        folder = workloads.write_model_dir(model, Path(tempfile.mkdtemp()) / model)
        self.llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True)
        self._ids = random.Random(0)

    def call(self, count: int, length: int, tokens: int) -> tuple[float, Counter[str], Counter[str]]:
        """Seconds of one call on new prompts; microseconds and launches a kernel."""
        prompts = [{"prompt_token_ids": workloads.token_ids(self._ids, length)} for _ in range(count)]
        params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True, detokenize=False)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            began = time.perf_counter()
            self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in profiler.key_averages():
            times[event.key] += event.self_device_time_total
            counts[event.key] += event.count if event.self_device_time_total else 0
        return seconds, times, counts

    def decode(self, rows: int, context: int) -> None:
        self.call(rows, context, 1)  # what is slow only once
        first, first_times, first_counts = self.call(rows, context, 1)
        seconds, times, counts = self.call(rows, context, STEPS + 1)
        times.subtract(first_times)
        counts.subtract(first_counts)
        self.show(f"decode {rows} x {context}", (seconds - first) / STEPS, times, counts, STEPS)

    def prefill(self, count: int, length: int) -> None:
        self.call(count, length, 1)
        self.show(f"prefill {count} x {length}", *self.call(count, length, 1), 1)

    def show(self, case: str, seconds: float, times: Counter[str], counts: Counter[str], steps: int) -> None:
        total = sum(times.values()) / steps
        launched = sum(counts.values()) / steps
        print(f"\n{case}: wall {seconds * 1e6:,.0f} us (profiled), kernels {total:,.0f} us in {launched:,.0f} launches")
        for name, micros in times.most_common(SHOWN):
            launches = max(counts[name] / steps, 1e-9)
            print(f"  {micros / steps:9,.1f} us  {launches:7.1f} x {micros / steps / launches:8.2f} us  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=workloads.MODELS)
    parser.add_argument("--cases", nargs="+", default=["decode:1x256", "decode:64x256", "prefill:1x1024"])
    args = parser.parse_args()
    breakdown = Breakdown(args.model)
    for case in args.cases:
        kind, _, size = case.partition(":")
        count, _, length = size.partition("x")
        {"decode": breakdown.decode, "prefill": breakdown.prefill}[kind](int(count), int(length))
    breakdown.llm.shutdown()


if __name__ == "__main__":
    main()
