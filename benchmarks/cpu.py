"""Decode and prefill rates of the whole engine on a CPU: Qwen3-0.6B's shape, random bf16 weights, 512-token prompts.

    python -m benchmarks.cpu [--model qwen3-0.6b] [--rounds 5] [--write]

Prefill is one prompt and one token; a decode step is (33 tokens less 1 token) / 32. The median of the rounds is
reported, each on prompts of its own. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import results_file, workloads
from benchmarks.results_file import Row

PROMPT, STEPS = 512, 32
# transformers 5.17 and llama.cpp (llama-cpp-python 0.3.36), bf16, on 2 cores of the same kind: the better of the two.
PEERS = {("decode_tok_s", "batch=1"): 13.2, ("decode_tok_s", "batch=8"): 41.7, ("prefill_tok_s", "1x512"): 719.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(workloads.MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write a file to benchmarks/results")
    args = parser.parse_args()
    from quire import LLM, SamplingParams

    folder = workloads.write_model_dir(args.model, Path(tempfile.mkdtemp()) / args.model)
    dice = random.Random(0)
    rows: list[Row] = []

    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", max_model_len=1024) as llm:

        def seconds(batch: int, tokens: int) -> float:
            prompts = [{"prompt_token_ids": workloads.token_ids(dice, PROMPT)} for _ in range(batch)]
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        def report(metric: str, case: str, values: list[float]) -> None:
            value = statistics.median(values)
            rows.append(Row("CPU", args.model, case, metric, round(value, 2), "tok/s", None, PEERS.get((metric, case))))
            spread = f"{min(values):.1f} … {max(values):.1f}"
            print(f"{metric:14}{case:10}{value:10.1f} tok/s   ({spread})", flush=True)

        seconds(1, 4)
        report("prefill_tok_s", "1x512", [PROMPT / seconds(1, 1) for _ in range(args.rounds)])
        for batch in (1, 8):
            report("decode_tok_s", f"batch={batch}", [decode_rate(seconds, batch) for _ in range(args.rounds)])
        device = llm.info.report.device
    print(results_file.table(rows))
    if args.write:
        command = " ".join(["python -m benchmarks.cpu", *sys.argv[1:]])
        print(results_file.write(rows, device, command, {"prompt": PROMPT, "steps": STEPS}))


def decode_rate(seconds: object, batch: int) -> float:
    assert callable(seconds)
    one = seconds(batch, 1)
    return batch * STEPS / (seconds(batch, 1 + STEPS) - one)


if __name__ == "__main__":
    main()
