"""What adapters cost a GPU: a decode step of many rows without LoRA, with it switched on and nobody using it, and with
many adapters in use, of several ranks.

    python -m benchmarks.adapters [--model llama-3.1-8b] [--batches 1 64 256] [--adapters 32] [--ranks 8 16]
                                  [--out FOLDER]

Dense models of random weights; adapters, random too, are of all linear layers of attention and MLP; those of one rank
are read from the same file, each to a place of its own. Engines come one
after the other, each in a process of its own, "off" first and last: what the machine does otherwise shows between the
two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import results_file, workloads
from benchmarks.results_file import Row
from benchmarks.serve import device_name
from quire import LLM, LoRARequest, SamplingParams

TOKENS, ROUNDS = 128, 3
ENGINES = ("off", "on", "off again")


def sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's matrices."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * dim
    found = {"self_attn.q_proj": (heads * dim, hidden), "self_attn.o_proj": (hidden, heads * dim)}
    found |= {f"self_attn.{name}_proj": (kv, hidden) for name in "kv"}
    found |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    return found | {"mlp.down_proj": (hidden, inner)}


def adapter(folder: Path, config: dict[str, Any], rank: int) -> str:
    folder.mkdir()
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in sizes(config).items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(rank, inputs).bfloat16() * 0.01
            tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, rank).bfloat16() * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return str(folder)


def step_ms(llm: LLM, batch: int, used: list[LoRARequest]) -> float:
    """Milliseconds a decode step, the median of some rounds; row i has adapter i, from the first again after the last.

    Both kinds of run have been seen before: what an engine does once would be taken off.
    """
    requests = [used[row % len(used)] for row in range(batch)] if used else None

    def run(round_: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": ids} for ids, _ in workloads.steps(batch, tokens, round_)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return time.perf_counter() - began

    run(99, TOKENS)
    run(199, 1)
    times = [(run(round_, TOKENS) - run(100 + round_, 1)) / (TOKENS - 1) * 1e3 for round_ in range(ROUNDS)]
    return statistics.median(times)


def engine(args: argparse.Namespace) -> None:
    """That of `args.engine`, in this process: a line ROW for each figure."""
    shared = {"load_format": "dummy", "skip_tokenizer_init": True, **json.loads(args.options)}
    with tempfile.TemporaryDirectory() as folder:
        model = workloads.write_model_dir(args.model, Path(folder) / args.model)
        cases: dict[str, list[LoRARequest]] = {args.engine: []}
        if args.engine == "on":
            config = json.loads((model / "config.json").read_text())
            files = {rank: adapter(Path(folder) / f"rank-{rank}", config, rank) for rank in args.ranks}
            made = [
                LoRARequest(f"a{number}", number, files[rank])
                for number, rank in enumerate(islice(cycle(args.ranks), args.adapters), 1)
            ]
            cases = {"on, none used": [], f"on, {args.adapters} used": made}
            shared |= {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": max(args.ranks)}
        with LLM(str(model), **shared) as llm:
            for case, used in cases.items():
                for batch in args.batches:
                    found = step_ms(llm, batch, used)
                    row = Row("lora", args.model, f"{case},batch={batch}", "step_ms", round(found, 4), "ms")
                    print("ROW " + json.dumps(row.__dict__), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(workloads.MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16], help="of the adapters, in turn")
    parser.add_argument("--options", default="{}", help="engine options as a JSON object")
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        engine(args)
        return
    rows: list[Row] = []
    for name in args.engines:
        command = [sys.executable, "-m", "benchmarks.adapters", *sys.argv[1:], "--engine", name]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines = [line.removeprefix("ROW ") for line in child.stdout.splitlines() if line.startswith("ROW ")]
        rows += [Row(**json.loads(line)) for line in lines]
        print(*lines, sep="\n", flush=True)
    print(results_file.table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {"adapters": args.adapters, "ranks": args.ranks, "tokens": TOKENS, "options": args.options}
    said = " ".join(["python -m benchmarks.adapters", *sys.argv[1:]])
    print(results_file.write(rows, device_name(), said, facts, args.out, "adapters"))


if __name__ == "__main__":
    main()
