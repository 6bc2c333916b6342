"""A decode step as the GPU sees it: its kernels, and where nothing runs.

    python -m benchmarks.timeline --model qwen3-0.6b --cases 1x256 256x600 [--options '{"quantization": "fp8"}']
                                  [--adapters 32] [--json FILE]

ROWSxCONTEXT: so many prompts of so many tokens. Medians over the steps of one run in which all rows decode; the kernels
are those of one step in the middle, and below them by name what all of it take until the next one begins. --adapters:
that the rows have, in turn, of ranks 16 and 8. "idle" is time in which
no kernel runs. A kernel may start before its predecessor has ended (dependent launch): its gap is negative then.
Of several ranks (--options '{"tensor_parallel_size": 2}') it is the first one's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import workloads
from benchmarks.adapters import adapter
from quire import LLM, LoRARequest, SamplingParams

STEPS = 24
FIRST_KERNEL = "_gather_decode"
HEAD, TAIL = 20, 8  # kernels shown of the beginning and the end


class Kernel(NamedTuple):
    start: float  # microseconds
    end: float
    name: str


def idle(kernels: Sequence[Kernel]) -> float:
    """Microseconds between the first start and the last end in which none of them runs; in order of their starts."""
    total, until = 0.0, kernels[0].end
    for kernel in kernels[1:]:
        total += max(0.0, kernel.start - until)
        until = max(until, kernel.end)
    return total


def steps_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Cut before each FIRST_KERNEL; what comes before the first one is left out, and so is the last step."""
    starts = [i for i, kernel in enumerate(kernels) if FIRST_KERNEL in kernel.name]
    return [list(kernels[a:b]) for a, b in itertools.pairwise(starts)]


def record(
    llm: LLM, rows: int, context: int, ids: random.Random, adapters: Sequence[LoRARequest] = (), *, aside: bool = False
) -> list[list[Kernel]]:
    """The kernels of the middle steps of a run of STEPS tokens. adapters: row i has number i, from the first again
    after the last. aside: the steps run in processes of their own."""
    used = [adapters[row % len(adapters)] for row in range(rows)] if adapters else None
    prompts = [{"prompt_token_ids": workloads.token_ids(ids, context)} for _ in range(rows)]
    params = SamplingParams(temperature=0.6, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False, lora_request=used)  # what is slow only once; its prefixes are cached
    if aside:
        llm.start_profile()
        llm.generate(prompts, params, use_tqdm=False, lora_request=used)
        return steps_of(kernels_in(Path(llm.stop_profile() or "")))[2:-2]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        llm.generate(prompts, params, use_tqdm=False, lora_request=used)
    kernels = sorted(
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith("Mem")
    )
    return steps_of(kernels)[2:-2]


def kernels_in(trace: Path) -> list[Kernel]:
    """Of a worker's trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted(
        Kernel(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "kernel"
    )


def summed_up(steps: Sequence[Sequence[Kernel]]) -> dict[str, float]:
    """Medians, in microseconds; the last step has no successor to tell its gap."""
    pairs = list(itertools.pairwise(steps))
    return {
        "step": statistics.median(after[0].start - step[0].start for step, after in pairs),
        "kernels": statistics.median(len(step) for step in steps),
        "idle in a step": statistics.median(idle(step) for step in steps),
        "idle between steps": statistics.median(
            max(0.0, after[0].start - max(kernel.end for kernel in step)) for step, after in pairs
        ),
    }


def show(case: str, steps: Sequence[Sequence[Kernel]], figures: dict[str, float]) -> None:
    print(f"\n{case}: " + ", ".join(f"{name} {value:,.1f}" for name, value in figures.items()))
    step = steps[len(steps) // 2]
    begin, until = step[0].start, step[0].start
    for number, kernel in enumerate(step):
        gap, until = kernel.start - until, max(until, kernel.end)
        if number < HEAD or number >= len(step) - TAIL:
            took = kernel.end - kernel.start
            print(f"  {kernel.start - begin:9.1f}  gap {gap:6.1f}  took {took:7.1f}  {kernel.name[:80]}")
        elif number == HEAD:
            print("  …")
    for name, (count, micros) in by_name(step).items():
        print(f"  {micros:9.1f} of {count:4} × {name[:80]}")


def by_name(step: Sequence[Kernel]) -> dict[str, tuple[int, float]]:
    """How many kernels of a name a step has, and how many microseconds pass from their starts to those of the next: of
    kernels that overlap only what nobody else takes. The longest first."""
    found: dict[str, tuple[int, float]] = {}
    for kernel, after in itertools.zip_longest(step, step[1:]):
        count, micros = found.get(kernel.name, (0, 0.0))
        found[kernel.name] = count + 1, micros + (kernel.end if after is None else after.start) - kernel.start
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help='as in benchmarks.gpu: "qwen3-30b-a3b+fp8"')
    parser.add_argument("--cases", nargs="+", default=["1x256", "256x600"])
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as a JSON object")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = workloads.write_model_dir(args.model, Path(tempfile.mkdtemp()) / args.model)
    config = json.loads((folder / "config.json").read_text())
    made = [
        LoRARequest(f"a{number}", number, adapter(folder / f"a{number}", config, 16 >> number % 2))
        for number in range(1, args.adapters + 1)
    ]
    ready: dict[str, Any] = {"enable_lora": True, "max_loras": args.adapters} if made else {}
    aside = any(name.endswith("_parallel_size") and count > 1 for name, count in args.options.items())
    if aside:
        traces = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}
        ready |= {"profiler_config": {**traces, "torch_profiler_use_gzip": False}}
    if (quantization := workloads.quantization_of(args.model)) is not None:
        ready |= {"quantization": quantization}
    llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **ready, **args.options)
    found = {}
    for case in args.cases:
        rows, _, context = case.partition("x")
        steps = record(llm, int(rows), int(context), random.Random(case), made, aside=aside)
        found[case] = summed_up(steps)
        show(f"{args.model} {case}", steps, found[case])
    llm.shutdown()
    if args.json:
        content = {"model": args.model, "options": args.options, "adapters": args.adapters, "microseconds": found}
        args.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
