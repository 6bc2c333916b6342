"""What a family's models do beside numbers: begin where a cached prompt ends, take adapters and codes of 8 bits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.types.output import RequestOutput
from tests.lora.adapters import write
from tests.models import checkpoints, sparse_checkpoints
from tests.models.cases import CASES
from tests.models.test_parity import random_tokens

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 126, "skip_tokenizer_init": True,
    "block_size": 16,
}  # fmt: skip
ASK = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, logprobs=0, ignore_eos=True)
PROMPT = 120  # tokens
# Of names that no factor is made for: what is looked up, what is no product of rows, and what chooses experts.
OTHERS = ("embed_tokens", "embed_in", "embed_positions", "embeddings", "wte", "wpe", "conv1d", "conv.conv", "lm_head",
          "embed_out", "output_layer", "router", "per_layer_model_projection", "_norm.")  # fmt: skip


class Features(NamedTuple):
    """cached: tokens of a prompt that came once before; same: whether its answer is the same. adapters: how far log-
    probabilities with an adapter of all products are from those of the weights that it is added to, the largest of any
    prompt token. codes: those of int8 from those of the weights as they are, the mean."""

    cached: int
    same: bool
    adapters: float
    codes: float


def make(case: str) -> Any:
    """case: as `table.variants` names it."""
    family, _, name = case.partition("-")
    if family in sparse_checkpoints.FAMILIES:
        return sparse_checkpoints.make(name)
    made, config = CASES[case]
    return checkpoints.make(made, **config)


def adapted(base: Path, folder: Path, merged: Path) -> Path:
    """An adapter of rank 2 of all products in `base`, and `merged`, the same with it in its weights."""
    generator, weights, tensors = torch.Generator().manual_seed(1), load_file(base / "model.safetensors"), {}
    is_gpt2 = '"gpt2"' in (base / "config.json").read_text(encoding="utf-8")  # whose weights are [in, out]
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or module == name or any(other in name for other in OTHERS):
            continue
        lines = weight.T if is_gpt2 else weight
        down = torch.randn(2, lines.shape[1], generator=generator) * 0.1
        up = torch.randn(len(lines), 2, generator=generator) * 0.1
        tensors |= {f"{module}.lora_A": down, f"{module}.lora_B": up}
        lines += up @ down
    shutil.copytree(base, merged)
    whole = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(whole, merged / "model.safetensors", {"format": "pt"})
    targets = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in tensors})
    return write(folder, tensors, target_modules=targets)


def logprobs(output: RequestOutput) -> torch.Tensor:
    """Of each prompt token but the first."""
    assert output.prompt_logprobs is not None
    both = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([line[token].logprob for token, line in both if line])


def measure(case: str, folder: Path) -> Features:
    base = checkpoints.save(make(case), folder / "base")
    adapter = LoRARequest("a", 1, str(adapted(base, folder / "adapter", folder / "merged")))
    prompt = random_tokens(3, [PROMPT])[0]
    without = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)  # log-probabilities want all computed
    with LLM(str(base), **OPTIONS, enable_lora=True, enable_prefix_caching=True) as llm:
        (plain,) = llm.generate([prompt], ASK, use_tqdm=False)
        (again,) = llm.generate([prompt], without, use_tqdm=False)
        (lora,) = llm.generate([prompt], ASK, lora_request=adapter, use_tqdm=False)
    merged = _alone(folder / "merged", prompt)
    codes = _alone(base, prompt, quantization="int8")
    assert (logprobs(lora) - logprobs(plain)).abs().max() > 0.01, "the adapter does nothing"
    return Features(
        again.num_cached_tokens or 0,
        again.outputs[0].token_ids == plain.outputs[0].token_ids,
        (logprobs(lora) - logprobs(merged)).abs().max().item(),
        (logprobs(codes) - logprobs(plain)).abs().mean().item(),
    )


def _alone(folder: Path, prompt: Sequence[int], **options: Any) -> RequestOutput:
    with LLM(str(folder), **OPTIONS, **options) as llm:
        return llm.generate([list(prompt)], ASK, use_tqdm=False)[0]
