"""Models whose layers are of unusual kinds, served by several ranks: one rank's answers, with adapters and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, LoRARequest, SamplingParams
from tests.e2e.test_ranks import close
from tests.effort import sampled
from tests.lora.adapters import write
from tests.models import checkpoints
from tests.models.cases import CASES
from tests.models.test_families import prompts

# Prompts come in chunks, rows start and end at different times.
OPTIONS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True,
    "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 60, "enable_lora": True,
}  # fmt: skip
ASK = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=4)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": CASES["gemma3n"],
    "kimi_linear": ("KimiLinear", {**CASES["kimi_linear"][1], "linear_num_heads": 4}),
    "olmo_hybrid": CASES["olmo_hybrid-biases"],
    "zamba2": ("Zamba2", {**CASES["zamba2-blocks"][1], "n_mamba_heads": 8}),
}
# Cut by rows, by columns, whole on every rank, and in parts that are either.
ADAPTED = {
    "gemma3n": ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "laurel.linear_left",
                "per_layer_model_projection"],
    "kimi_linear": ["self_attn.k_proj", "self_attn.f_a_proj", "self_attn.f_b_proj", "self_attn.b_proj",
                    "self_attn.o_proj", "shared_experts.up_proj"],
    "olmo_hybrid": ["linear_attn.q_proj", "linear_attn.v_proj", "linear_attn.a_proj", "linear_attn.o_proj",
                    "self_attn.k_proj"],
    "zamba2": ["self_attn.v_proj", "self_attn.o_proj", "feed_forward.gate_up_proj", "feed_forward.down_proj",
               "mamba.in_proj", "mamba.out_proj"],
}  # fmt: skip


@pytest.mark.parametrize("family", sampled(list(MODELS), lambda family: family == "kimi_linear"))
@pytest.mark.parametrize("size", sampled([2, 4], lambda size: size == 2))
def test_ranks_answer_as_one_does(family: str, size: int, tmp_path: Path) -> None:
    made, config = MODELS[family]
    folder = checkpoints.save(checkpoints.make(made, **config), tmp_path / "base")
    adapter = LoRARequest("one", 1, str(adapted(folder, tmp_path / "adapter", ADAPTED[family])))
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    wanted = [adapter if number % 2 else None for number in range(len(given))]
    found = []
    for ranks in (1, size):
        with LLM(str(folder), **OPTIONS, tensor_parallel_size=ranks) as llm:
            found.append([one.outputs[0] for one in llm.generate(given, ASK, lora_request=wanted, use_tqdm=False)])
            plain = llm.generate(given, ASK, use_tqdm=False)
            assert llm.call("check") is None
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        close(ours.logprobs, theirs.logprobs)
    changed = [one.token_ids != other.outputs[0].token_ids for one, other in zip(found[0], plain, strict=True)]
    assert changed == [number % 2 == 1 for number in range(len(given))]


def adapted(folder: Path, into: Path, modules: list[str]) -> Path:
    """An adapter of DoRA for all modules of these names."""
    made, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(modules)):
            tensors[f"{module}.lora_A"] = torch.randn(2, weight.shape[1], generator=made) * 0.3
            tensors[f"{module}.lora_B"] = torch.randn(len(weight), 2, generator=made) * 0.3
            tensors[f"{module}.lora_magnitude_vector"] = torch.rand(len(weight), generator=made) * 2 + 0.5
    assert all(any(name.endswith(f"{module}.lora_A") for name in tensors) for module in modules)
    return write(into, tensors, target_modules=modules, use_dora=True)
