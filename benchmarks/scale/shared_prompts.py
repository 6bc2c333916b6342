"""What each rank of a CPU has to do for one long prompt, alone, with shared layers, and as one of several copies that
share prompts: seconds of its processor, which other work on the machine changes less than the time on the clock.

    python -m benchmarks.scale.shared_prompts [--tokens 6000] [--prompts 3] [--write]

The model has random weights and one thread a rank. Each prompt is new, and one token of an answer is made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results_file
from benchmarks.results_file import Row
from quire import LLM, SamplingParams

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
    "hidden_act": "silu",
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "2 ranks share layers": {"tensor_parallel_size": 2},
    "2 copies share prompts": {"prefill_context_parallel_size": 2},
    "4 copies share prompts": {"prefill_context_parallel_size": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for layout, options in LAYOUTS.items():
            seconds = measured(folder, options, arguments.tokens, arguments.prompts)
            case = f"{arguments.tokens} tokens, {layout}"
            rows.append(Row("shared_prompts", "llama 512x6", case, "the rank with most", max(seconds), "s"))
            rows.append(Row("shared_prompts", "llama 512x6", case, "the rank with least", min(seconds), "s"))
            print(f"{case:40s} {' '.join(f'{each:.2f}' for each in seconds)} s", flush=True)
    if arguments.write:
        command = f"python -m benchmarks.scale.shared_prompts {' '.join(sys.argv[1:])}"
        print(results_file.write(rows, f"cpu {os.cpu_count()} threads", command, SHAPE, part="shared-prompts"))


def measured(folder: str, options: dict[str, Any], tokens: int, prompts: int) -> list[float]:
    """Of each rank the processor's seconds for a prompt, the median of several."""
    numbers = random.Random(0)
    fixed: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True, "load_format": "dummy",
        "max_num_seqs": 4, "max_model_len": tokens + 16, "distributed_executor_backend": "mp",
        "num_gpu_blocks_override": 2 + (tokens + 16) // 16,
    }  # fmt: skip
    with LLM(folder, **fixed, **options) as llm:
        children = psutil.Process().children(recursive=True)
        ranks = [child for child in children if "quire.executor.worker_process" in child.cmdline()]
        found: list[list[float]] = []
        for number in range(prompts + 1):
            before = [sum(rank.cpu_times()[:2]) for rank in ranks]
            ids = [numbers.randrange(5, SHAPE["vocab_size"]) for _ in range(tokens)]
            llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1), use_tqdm=False)
            if number:  # the first has memory to get
                found.append([sum(rank.cpu_times()[:2]) - was for rank, was in zip(ranks, before, strict=True)])
    return [statistics.median(each) for each in zip(*found, strict=True)]


if __name__ == "__main__":
    main()
