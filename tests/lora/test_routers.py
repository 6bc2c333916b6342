"""Adapters of what chooses experts, and of the gate before shared ones, compute what merged weights do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, LoRARequest, SamplingParams
from tests.lora.adapters import PROMPT, write
from tests.lora.test_parity import scores
from tests.models import checkpoints, sparse_checkpoints

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 64, "skip_tokenizer_init": True,
    "block_size": 4, "num_gpu_blocks_override": 60, "max_num_seqs": 4,
}  # fmt: skip
ASK = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=0, logprobs=0, ignore_eos=True)
# What files call them before transformers 5, where they are linear layers; and where transformers 5 has their numbers.
CASES = {
    "qwen2": {"mlp.gate": "mlp.gate", "mlp.shared_expert_gate": "mlp.shared_expert_gate"},
    "mixtral": {"block_sparse_moe.gate": "mlp.gate"},
    "gpt_oss": {"mlp.router": "mlp.router"},
    "ernie": {"mlp.gate": "mlp.gate"},
    "deepseek3": {"mlp.gate": "mlp.gate"},
    "phimoe": {"mlp.router": "mlp.router"},
    "hunyuan": {"mlp.gate.wg": "mlp.gate.wg"},
    "llama4": {"feed_forward.router": "feed_forward.router"},
}


def made(
    model: transformers.PreTrainedModel, names: dict[str, str], folder: Path, **config: Any
) -> tuple[Path, transformers.PreTrainedModel]:
    """An adapter of some of a model's layers, and the model with it merged."""
    merged, tensors, drawn = copy.deepcopy(model), {}, torch.Generator().manual_seed(5)
    for index in range(model.config.num_hidden_layers):
        for told, ours in names.items():
            weight = merged.state_dict().get(f"model.layers.{index}.{ours}.weight")
            if weight is None:
                continue  # a layer without experts
            (outputs, inputs), name = weight.shape, f"model.layers.{index}.{told}"
            down, up = torch.randn(3, inputs, generator=drawn) * 0.3, torch.randn(outputs, 3, generator=drawn) * 0.3
            tensors |= {f"{name}.lora_A": down, f"{name}.lora_B": up}
            whole = weight + config.get("lora_alpha", 6) / 3 * up @ down
            if config.get("use_dora"):
                magnitude = torch.rand(outputs, generator=drawn) * 3 + 0.5
                tensors[f"{name}.lora_magnitude_vector"] = magnitude
                whole *= (magnitude / whole.norm(dim=1))[:, None]
            weight.copy_(whole)
    return write(folder, tensors, **{"r": 3, "lora_alpha": 6, "target_modules": "all-linear", **config}), merged


@pytest.mark.parametrize(
    ("case", "config", "options"),
    [
        *((case, {}, {}) for case in CASES),
        ("qwen2", {"use_dora": True}, {}),
        ("gpt_oss", {"use_dora": True}, {}),
        ("qwen2", {"target_modules": ["gate", "shared_expert_gate"]}, {"quantization": "fp8"}),
        pytest.param("qwen2", {"use_dora": True}, {"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param(
            "qwen2", {}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.long
        ),
    ],
)  # fmt: skip
def test_as_merged_weights(case: str, config: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    model = sparse_checkpoints.make(case)
    adapter, merged = made(model, CASES[case], tmp_path / "adapter", **config)
    base, whole = checkpoints.save(model, tmp_path / "base"), checkpoints.save(merged, tmp_path / "merged")
    request, prompts = LoRARequest("a", 1, str(adapter)), [PROMPT, PROMPT[3:]]
    with LLM(str(base), **OPTIONS, **options, enable_lora=True) as llm:
        plain, *adapted = llm.generate(
            [PROMPT, *prompts], ASK, lora_request=[None, request, request], use_tqdm=False
        )  # fmt: skip
    with LLM(str(whole), **OPTIONS, **options) as llm:
        wanted = llm.generate(prompts, ASK, use_tqdm=False)
    for one, other in zip(adapted, wanted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        torch.testing.assert_close(scores(one), scores(other), atol=1e-4, rtol=0)
    assert (scores(plain)[: len(PROMPT) - 1] - scores(adapted[0])[: len(PROMPT) - 1]).abs().max() > 0.01
