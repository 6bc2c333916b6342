"""GGUF files of every family, written by the format's library: the model is the one that the files stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from quire.config.gguf.folder import gguf_folder
from quire.config.model_info import read_model_info
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.quantization.select import make_method
from tests.gguf import writer
from tests.models import checkpoints
from tests.models.paged import PagedRows

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama with biases": ("Llama", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", "llama", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", "qwen2", {}),
    "qwen2moe": (
        "Qwen2Moe", "qwen2moe",
        {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "qwen3": ("Qwen3", "qwen3", {"tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "gemma": ("Gemma", "gemma", {}),
    "gemma2": ("Gemma2", "gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3Text", "gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "phi3": ("Phi3", "phi3", {"head_dim": ...}),
    "olmo2": ("Olmo2", "olmo2", {"head_dim": ...}),
    "olmoe": ("Olmoe", "olmoe", {**EXPERTS, "head_dim": ..., "norm_topk_prob": False}),
    "granite": (
        "Granite", "granite",
        {"head_dim": ..., "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
         "logits_scaling": 2.0},
    ),
    "command-r": ("Cohere", "command-r", {"head_dim": ..., "logit_scale": 0.25}),
    "cohere2": ("Cohere2", "cohere2", {"logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 4}),
    "starcoder2": ("Starcoder2", "starcoder2", {"head_dim": ..., "use_bias": True}),
    "smollm3": ("SmolLM3", "smollm3", {"head_dim": ..., "num_hidden_layers": 4}),
    "glm4": ("Glm4", "glm4", {"attention_bias": True}),
    "arcee": ("Arcee", "arcee", {}),
    "seed_oss": ("SeedOss", "seed_oss", {"attention_bias": True, "attention_out_bias": False}),
}  # fmt: skip


def mixed(name: str) -> Type:
    """As the mixtures that people have: parts of one matrix in types of their own."""
    kinds = {"attn_v": Type.Q8_0, "ffn_down": Type.Q5_1, "attn_q": Type.Q4_0, "token_embd": Type.Q5_0}
    return next((kind for part, kind in kinds.items() if part in name), Type.Q4_1)


def build(folder: Path) -> DecoderStack:
    info = read_model_info(folder, {})
    method = make_method(info.quantization.get("quant_method"), info.quantization)
    model = catalog.build(info, torch.float32, checkpoints.CPU, 64, method)
    weights.load(model, folder, "auto")
    return model


def logits(model: DecoderStack) -> list[torch.Tensor]:
    return PagedRows(model).step([1, 2], [list(range(30)), list(range(40, 60))])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", CASES)
def test_a_family_is_what_its_file_stands_for(case: str, tmp_path: Path) -> None:
    family, arch, config = CASES[case]
    folder = checkpoints.save(checkpoints.make(family, **{**SIZES, **config}), tmp_path / "plain")
    state = writer.write(folder, tmp_path / "model.gguf", arch, mixed)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    ours, theirs = build(gguf_folder(tmp_path / "model.gguf")), build(folder)
    for one, other in zip(logits(ours), logits(theirs), strict=True):
        assert other.abs().max() > 0.1
        assert (one - other).abs().max() <= 1e-4
