"""The longest pause of running streams while an adapter is loaded: `python -m benchmarks.adapter_load`.

A model of random weights, a few streams, and an adapter for all of its layers that is loaded in the midst of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from quire import AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams

HIDDEN, INNER, LAYERS = 512, 2048, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}  # fmt: skip


def adapter(folder: Path, rank: int) -> Path:
    """Of every linear layer; its size is about that of rank * 380 KB."""
    folder.mkdir()
    sizes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    sizes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    tensors = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in sizes.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(rank, inputs) * 0.01
            tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, rank) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


async def measure(folder: Path, made: Path, rank: int, streams: int) -> None:
    args = AsyncEngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype="float32",
        enable_lora=True, max_loras=1, max_lora_rank=rank, max_num_seqs=streams + 1, num_gpu_blocks_override=2000,
        max_model_len=4096,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(args)
    times: list[list[float]] = [[] for _ in range(streams)]

    async def stream(number: int) -> None:
        params = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate({"prompt_token_ids": [number + 1, 2, 3]}, params, f"s{number}"):
            times[number].append(time.perf_counter())

    running = [asyncio.create_task(stream(number)) for number in range(streams)]
    await asyncio.sleep(3)
    began = time.perf_counter()
    await engine.add_lora(LoRARequest("big", 1, str(made)))
    ended = time.perf_counter()
    await asyncio.sleep(1)
    for task in running:
        task.cancel()
    gaps = [(later, later - earlier) for earlier, later in pairwise(times[0])]
    before = sorted(gap for at, gap in gaps if began - 2 < at < began)
    during = max(gap for at, gap in gaps if began < at < ended + 0.5)
    size = (made / "adapter_model.safetensors").stat().st_size / 1e6
    usual, longest = before[len(before) // 2] * 1e3, before[-1] * 1e3
    print(f"adapter of {size:.0f} MB, {streams} streams: a step takes {usual:.0f} ms, at most {longest:.0f} ms")
    print(f"during the load of {ended - began:.2f} s the longest pause was {during * 1e3:.0f} ms")
    engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name, "base")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        made = adapter(Path(name, "adapter"), options.rank)
        asyncio.run(measure(folder, made, options.rank, options.streams))


if __name__ == "__main__":
    main()
