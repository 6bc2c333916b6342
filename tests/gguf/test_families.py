"""GGUF files of every family, written by the format's library: the model is the one that the files stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from quire.config.gguf.folder import gguf_folder
from quire.config.model_info import read_model_info
from quire.foundation.errors import ConfigError, WeightsError
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.quantization.select import make_method
from tests.gguf import writer
from tests.gguf.conversions import CONVERSIONS
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
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **ROUTED, "head_dim": ..., "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32, "v_head_dim": 16, "num_hidden_layers": 3,
}  # fmt: skip
GROUPS = {"n_group": 2, "topk_group": 1, "num_mtp_layers": 0, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
ONE_GROUP = {**GROUPS, "n_group": 1, "topk_group": 1}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
SHARPENED = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
TEMPERED = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
ALONE: dict[str, Any] = {
    **dict.fromkeys(SIZES, ...), "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": ...,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_head": 16}
GRANITE = {
    **MAMBA2, "head_dim": ..., "shared_intermediate_size": 32, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.6, "logits_scaling": 0.7, "layer_types": ["mamba", "attention", "mamba"],
    "num_hidden_layers": 3,
}  # fmt: skip
NEMOTRON = {
    "num_hidden_layers": ..., "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 8,
    "head_dim": 32, "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
}  # fmt: skip
SPARSE_NEMOTRON = {
    **NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2,
}  # fmt: skip
DELTA = {
    **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8, "num_hidden_layers": 4, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Metadata and ways of files that are not what their converter usually writes.
MORE: dict[str, dict[str, Any]] = {
    "deepseek2": {"expert_weights_norm": None},
    "deepseek2 of old": {
        "attention.head_count_kv": 4, "attention.key_length": 40, "attention.value_length": 16,
        "attention.key_length_mla": None, "attention.value_length_mla": None, "expert_weights_norm": None,
    },
    "deepseek3": {"expert_gating_func": 2},
    "glm4moe": {"block_count": 3, "nextn_predict_layers": 1},
    "kimi": {"expert_gating_func": 2},
    "granitehybrid": {"expert_used_count": 0, "expert_shared_feed_forward_length": None},
}  # fmt: skip
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
    "gemma3n": (
        "Gemma3nText", "gemma3n",
        {"sliding_window": 9, "laurel_rank": 32, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
         "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 97,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
         "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0, 0.0]},
    ),
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
    "gpt-oss": ("GptOss", "gpt-oss", {**LOCAL, "sliding_window": 8, "intermediate_size": 32}),
    "deepseek2": ("DeepseekV2", "deepseek2", {**LATENT, "routed_scaling_factor": 1.5, "rope_parameters": SHARPENED}),
    "deepseek2 of old": (
        "DeepseekV2", "deepseek2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "q_lora_rank": None},
    ),
    "deepseek3": ("DeepseekV3", "deepseek2", {**LATENT, **GROUPS, "rope_parameters": SHARPENED}),
    "kimi": ("DeepseekV3", "deepseek2", {**LATENT, **ONE_GROUP, "tie_word_embeddings": True}),
    "llama4": (
        "Llama4Text", "llama4",
        {"num_local_experts": 4, "num_hidden_layers": 4, "intermediate_size": 32, "intermediate_size_mlp": 96,
         "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    ),
    "glm4moe": (
        "Glm4Moe", "glm4moe",
        {**ROUTED, "num_mtp_layers": 0, "use_qk_norm": True, "routed_scaling_factor": 1.5, "rope_parameters": HALF},
    ),
    "dots1": ("Dots1", "dots1", {**ROUTED, "norm_topk_prob": True, "routed_scaling_factor": 2.0}),
    "ernie4_5": ("Ernie4_5", "ernie4_5", {"use_bias": True}),
    "ernie4_5-moe": (
        "Ernie4_5_Moe", "ernie4_5-moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
         "num_hidden_layers": 3},
    ),
    "hunyuan-dense": ("HunYuanDenseV1", "hunyuan-dense", {}),
    "hunyuan-moe": ("HunYuanMoEV1", "hunyuan-moe", {"num_experts": 4, "moe_topk": 2, "intermediate_size": 32}),
    "exaone4": ("Exaone4", "exaone4", {"sliding_window": 8, "num_hidden_layers": 4}),
    "granitemoe": (
        "GraniteMoe", "granitemoe",
        {**LOCAL, "head_dim": ..., "attention_multiplier": 0.2, "embedding_multiplier": 3.0,
         "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "phimoe": ("Phimoe", "phimoe", {**LOCAL, "head_dim": ..., "attention_bias": True, "lm_head_bias": True}),
    "minimax-m2": ("MiniMaxM2", "minimax-m2", {**LOCAL, "intermediate_size": 32, "rope_parameters": HALF}),
    "stablelm": ("StableLm", "stablelm", {"head_dim": ..., "use_qkv_bias": True}),
    "stablelm 2": ("StableLm", "stablelm", {"head_dim": ..., "qk_layernorm": True, "use_parallel_residual": True}),
    "nemotron": ("Nemotron", "nemotron", {"head_dim": ...}),
    "mistral3": ("Mistral", "mistral3", {}),
    "ministral3": ("Ministral3", "mistral3", {"rope_parameters": TEMPERED}),
    "lfm2": (
        "Lfm2", "lfm2",
        {"head_dim": ..., "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
         "block_auto_adjust_ff_dim": False},
    ),
    "lfm2moe": (
        "Lfm2Moe", "lfm2moe",
        {**EXPERTS, "head_dim": ..., "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
         "num_dense_layers": 1, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "exaone": ("Llama", "exaone", {"head_dim": ...}),
    "mamba": ("Mamba", "mamba", {**ALONE, "state_size": 6, "time_step_rank": 4}),
    "falcon_mamba": ("FalconMamba", "mamba", {**ALONE, "state_size": 6, "time_step_rank": 4}),
    "mamba2": ("Mamba2", "mamba2", {**ALONE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8}),
    "granitehybrid": ("GraniteMoeHybrid", "granitehybrid", {**GRANITE, "num_local_experts": 0}),
    "granitehybrid with experts": (
        "GraniteMoeHybrid", "granitehybrid", {**GRANITE, **LOCAL, "position_embedding_type": "rope"},
    ),
    "falcon-h1": (
        "FalconH1", "falcon-h1",
        {**MAMBA2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
         "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.4, "attention_in_multiplier": 1.5,
         "attention_out_multiplier": 0.7, "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2,
         "ssm_multipliers": [0.5, 1.1, 1.3, 0.9, 0.7], "mlp_multipliers": [0.6, 1.4]},
    ),
    "falcon-h1 without norms": ("FalconH1", "falcon-h1", {**MAMBA2, "mamba_d_ssm": 128}),
    "nemotron_h": ("NemotronH", "nemotron_h", NEMOTRON),
    "nemotron_h_moe": ("NemotronH", "nemotron_h_moe", SPARSE_NEMOTRON),
    "nemotron_h_moe of latent rows": ("NemotronH", "nemotron_h_moe", {**SPARSE_NEMOTRON, "moe_latent_size": 32}),
    "qwen3next": ("Qwen3Next", "qwen3next", DELTA),
    "qwen3next of old": ("Qwen3Next", "qwen3next", DELTA),
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
    form = case if case in CONVERSIONS else arch
    state = writer.write(folder, tmp_path / "model.gguf", arch, mixed, more=MORE.get(case), form=form)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    ours, theirs = build(gguf_folder(tmp_path / "model.gguf")), build(folder)
    for one, other in zip(logits(ours), logits(theirs), strict=True):
        assert other.abs().max() > 0.1
        assert (one - other).abs().max() <= 1e-4


@pytest.mark.parametrize("case", ["qwen3next", "glm4moe", "deepseek3"])
def test_layers_that_predict_further_tokens_are_left_out(case: str, tmp_path: Path) -> None:
    """They stand behind the last one, and files count them."""
    family, arch, config = CASES[case]
    sizes = {**SIZES, **config}
    layers = sizes["num_hidden_layers"]
    folder = checkpoints.save(checkpoints.make(family, **{**sizes, "num_hidden_layers": layers + 1}), tmp_path / "more")
    more = {**MORE.get(case, {}), "block_count": layers + 1, "nextn_predict_layers": 1}
    form = case if case in CONVERSIONS else arch
    state = writer.write(folder, tmp_path / "model.gguf", arch, mixed, more=more, form=form)
    kept = {name: tensor.contiguous() for name, tensor in state.items() if f".layers.{layers}." not in name}
    assert len(kept) < len(state)
    save_file(kept, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    by_layer = {key: value[:-1] for key, value in told.items() if isinstance(value, list) and len(value) == layers + 1}
    checkpoints.rewrite_config(folder, **by_layer, num_hidden_layers=layers)
    ours, theirs = build(gguf_folder(tmp_path / "model.gguf")), build(folder)
    for one, other in zip(logits(ours), logits(theirs), strict=True):
        assert other.abs().max() > 0.1
        assert (one - other).abs().max() <= 1e-4


def test_halves_of_latent_matrices_may_be_in_different_parts(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("DeepseekV3", **{**SIZES, **LATENT, **ONE_GROUP}), tmp_path / "plain")
    more = {"expert_gating_func": 2}
    state = writer.write(folder, tmp_path / "model.gguf", "deepseek2", mixed, more=more, split_max_tensors=3)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    parts = sorted(tmp_path.glob("*.gguf"))
    names = [[tensor.name for tensor in gguf.GGUFReader(part).tensors] for part in parts]
    assert any("blk.1.attn_k_b.weight" in own and "blk.1.attn_v_b.weight" not in own for own in names)
    ours, theirs = build(gguf_folder(parts[0])), build(folder)
    for one, other in zip(logits(ours), logits(theirs), strict=True):
        assert other.abs().max() > 0.1
        assert (one - other).abs().max() <= 1e-4


def test_a_half_without_the_other_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("DeepseekV3", **{**SIZES, **LATENT, **ONE_GROUP}), tmp_path / "plain")
    writer.write(folder, tmp_path / "model.gguf", "deepseek2", mixed, more={"expert_gating_func": 2})
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"blk.1.attn_v_b.weight", b"blk.9.attn_v_b.weight"))
    with pytest.raises(WeightsError, match=r"blk\.1\.attn_k_b\.weight without the other half"):
        build(gguf_folder(tmp_path / "model.gguf"))


def test_states_that_would_grow_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Mamba2", **CASES["mamba2"][2]), tmp_path / "plain")
    writer.write(folder, tmp_path / "model.gguf", "mamba2", mixed)
    fading = next(one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors if one.name == "blk.0.ssm_a")
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.seek(fading.data_offset)
        file.write(bytes(4))
    with pytest.raises(WeightsError, match=r"numbers >= 0 in blk\.0\.ssm_a"):
        build(gguf_folder(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("arch", "family", "config", "more", "message"),
    [
        ("hunyuan-moe", "HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2}, {"expert_shared_count": 2}, "more than one"),
        ("deepseek2", "DeepseekV2", LATENT, {"attention.key_length_mla": 4}, "heads of 4 and 16 columns, 8 of which"),
        ("stablelm", "StableLm", {"head_dim": ...}, {"rope.dimension_count": 17}, "rope.dimension_count=17 of heads"),
        ("mamba2", "Mamba2", CASES["mamba2"][2], {"ssm.time_step_rank": 7}, "ssm.inner_size=128 is no multiple"),
        ("mamba2", "Mamba2", CASES["mamba2"][2], {"ssm.inner_size": 96}, "no multiple of embedding_length=64"),
        ("nemotron_h", "NemotronH", NEMOTRON, {"feed_forward_length": 96}, "must be 4 numbers, one a layer, got 96"),
        ("nemotron_h", "NemotronH", NEMOTRON, {"feed_forward_length": [0, 9, 0, 8]}, "of one kind but different sizes"),
        ("gemma3n", "Gemma3nText", CASES["gemma3n"][2], {"attention.shared_kv_layers": None}, "count layers, got None"),
        ("gemma3n", "Gemma3nText", CASES["gemma3n"][2], {"activation_sparsity_scale": [0.5]}, "must be 6 numbers"),
        ("nemotron_h_moe", "NemotronH", SPARSE_NEMOTRON, {"nextn_predict_layers": 1}, "nextn_predict_layers=1"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    arch: str, family: str, config: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = checkpoints.save(checkpoints.make(family, **{**SIZES, **config}), tmp_path / "plain")
    writer.write(folder, tmp_path / "model.gguf", arch, mixed, more=more)
    with pytest.raises(ConfigError, match=message):
        gguf_folder(tmp_path / "model.gguf")
