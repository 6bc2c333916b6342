"""Checkpoints of Mistral's own form: the same weights as Hugging Face's, under other names and not permuted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.engine import EngineConfig
from quire.config.files.mistral_format import config_of, decoders_name
from quire.config.model_info import check_architecture, read_model_info
from quire.config.resolve import resolve
from quire.foundation.errors import ConfigError
from quire.models import catalog, weights
from tests.models import checkpoints
from tests.models.paged import PagedRows

PARAMS = {
    "dim": 48, "n_layers": 4, "head_dim": 12, "hidden_dim": 80, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 97, "rope_theta": 5000.0, "max_position_embeddings": 128,
}  # fmt: skip
HF: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 12, "rms_norm_eps": 1e-5, "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
YARN = {"original_max_position_embeddings": 32, "factor": 4.0, "alpha": 1.5, "beta": 20.0}
_HF_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "original_max_position_embeddings": 32, "factor": 4.0}
_HF_YARN |= {"beta_fast": 20.0, "beta_slow": 1.5}
_ALL = {"mscale": 1.0, "mscale_all_dim": 1.0}
_LATENT = {"q_lora_rank": 28, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
# transformers' class and its config, and what params.json says instead.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("Mistral", {}, {}),
    "tied-window": (
        "Mistral",
        {"tie_word_embeddings": True, "sliding_window": 9},
        {"tied_embeddings": True, "sliding_window": 9},
    ),
    "windows": (
        "Ministral",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"sliding_window": [None, 9]},
    ),
    "yarn": ("Mistral", {"rope_parameters": _HF_YARN}, {"yarn": YARN}),
    "yarn-unscaled": (
        "Mistral", {"rope_parameters": {**_HF_YARN, "attention_factor": 1.0}}, {"yarn": {**YARN, "apply_scale": False}},
    ),
    "growing": (
        "Ministral3",
        {"rope_parameters": {**_HF_YARN, "attention_factor": 1.0, "llama_4_scaling_beta": 0.3}},
        {"yarn": {**YARN, "apply_scale": False},
         "llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.3}},
    ),
    "experts": (
        "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    "latent": (
        "Mistral4",
        {**_LATENT, "num_key_value_heads": 4, "head_dim": ..., "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
         "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
         "rope_parameters": {**_HF_YARN, **_ALL, "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 0.4}},
        {**_LATENT, "yarn": YARN, "llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.3},
         "moe": {"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 1, "expert_hidden_dim": 24,
                 "first_k_dense_replace": 1, "route_every_n": 1, "routed_scale": 1.5, "num_expert_groups": 1,
                 "num_expert_groups_per_tok": 1, "expert_parallel": 1}},
    ),
}  # fmt: skip
_NAMES = (
    (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
    (r"self_attn\.(q|kv)_([ab])_proj", r"attention.w\1_\2"),
    (r"self_attn\.(q|kv)_a_layernorm", r"attention.\1_a_norm"),
    (r"mlp\.(experts\.\d+|shared_experts)\.gate_proj", r"\1.w1"),
    (r"mlp\.(experts\.\d+|shared_experts)\.down_proj", r"\1.w2"),
    (r"mlp\.(experts\.\d+|shared_experts)\.up_proj", r"\1.w3"), (r"mlp\.gate\.weight", "gate.weight"),
    (r"^model\.embed_tokens", "tok_embeddings"), (r"^lm_head", "output"), (r"^model\.", ""),
    (r"self_attn\.([qkvo])_proj", r"attention.w\1"), ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"), (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"), (r"mlp\.up_proj", "feed_forward.w3"),
    (r"block_sparse_moe", "feed_forward"),
)  # fmt: skip


def make(case: str, folder: Path) -> Any:
    """In both forms: `folder`/hf is transformers', and `folder` Mistral's, without config.json."""
    family, config, params = CASES[case]
    model = checkpoints.make(family, **{**HF, **config})
    checkpoints.save(model, folder / "hf")
    state = {}
    for name, tensor in load_file(folder / "hf" / "model.safetensors").items():
        if match := re.search(r"self_attn\.([qk])_proj\.weight$", name):
            heads = 4 if match[1] == "q" else 2
            tensor = tensor.view(heads, 2, 6, 48).transpose(1, 2).reshape(heads * 12, 48).contiguous()
        for old, new in _NAMES:
            name = re.sub(old, new, name)
        state[name] = tensor
    state["vision_encoder.ln_pre.weight"] = torch.ones(3)
    save_file(state, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps({**PARAMS, **params}))
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_same_model_in_both_forms(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    tokens = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].float()
    info = read_model_info(tmp_path, {})
    assert info.is_mistral
    assert info.eos_token_ids == [2]
    check_architecture(tmp_path, {})
    ours = catalog.build(info, torch.float32, checkpoints.CPU, info.max_position)
    weights.load(ours, tmp_path, "mistral")
    rows = PagedRows(ours, max_rows=1)
    parts = [rows.step([1], [tokens[:40]])[0], *(rows.step([1], [[token]])[0] for token in tokens[40:])]
    assert (torch.cat(parts) - expected).abs().max() <= 1e-4


def test_which_form_is_read(tmp_path: Path) -> None:
    """config.json if there is one; a folder with both has its weights twice."""
    make("dense", tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).rename(tmp_path / name)
    found = {}
    for options in ({}, {"load_format": "mistral"}, {"config_format": "mistral"}, {"config_format": "hf"}):
        config = EngineConfig.from_flat(model=str(tmp_path), device="cpu", dtype="float32", **options)
        resolved = resolve(config)
        model = catalog.build(resolved.info, torch.float32, checkpoints.CPU, 64)
        weights.load(model, tmp_path, "mistral" if resolved.info.is_mistral else "auto")
        found[str(options)] = resolved.info.is_mistral
    assert list(found.values()) == [False, True, True, False]
    with pytest.raises(ConfigError, match="load_format=mistral goes with params"):
        resolve(EngineConfig.from_flat(model=str(tmp_path), config_format="hf", load_format="mistral"))
    with pytest.raises(ConfigError, match="load_format=pt reads Hugging Face's files"):
        resolve(EngineConfig.from_flat(model=str(tmp_path), config_format="mistral", load_format="pt", device="cpu"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": None}, "params.json lacks 'dim'"),
        ({"n_heads": "4"}, "n_heads must be an integer"),
        ({"causal": False}, "causal=False is not supported"),
        ({"use_biases": True}, "use_biases=True is not supported"),
        ({"sliding_window": [None, 3, 4]}, "must repeat evenly"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 3}}, "first_k_dense_replace"),
        ({"yarn": {"factor": "x"}}, "factor must be a finite number"),
    ],
)
def test_params_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        config_of({**PARAMS, **changes})


@pytest.mark.parametrize(("key", "value"), [("kv_lora_rank", 512), ("quantization", {"qformat_weight": "fp8_e4m3"})])
def test_what_layers_do_not_know_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({**PARAMS, key: value}))
    with pytest.raises(ConfigError, match=r"kv_lora_rank|quantization_config"):
        read_model_info(tmp_path, {})


def test_names_of_the_vision_part_are_left_out() -> None:
    assert decoders_name("vision_encoder.transformer.layers.0.attention.wq.weight") is None
    assert decoders_name("patch_merger.merging_layer.weight") is None
    assert decoders_name("layers.3.attention.wo.weight") == "model.layers.3.self_attn.o_proj.weight"
    assert decoders_name("layers.3.unheard_of.weight") == "model.layers.3.unheard_of.weight"


def test_transformers_does_not_read_it(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    with pytest.raises(ConfigError, match="which model_impl=transformers does not read"):
        read_model_info(tmp_path, {}, impl="transformers")
