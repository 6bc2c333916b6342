"""Mistral's own form of a checkpoint: params.json instead of config.json, and names of tensors that go with it.

Queries and keys of these files turn in pairs of neighbouring columns (2i, 2i + 1), where Hugging Face's are permuted so
that columns i and i + dim/2 are a pair. Nothing is permuted here: the layers are told (`rope_interleaved`).
Form: https://github.com/mistralai/mistral-inference (args.py, transformer_layers.py)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive, read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

PARAMS = "params.json"
_USUAL_LENGTH = 128_000  # of files that say none
_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "quantization": "quantization_config",
}
# Of training and of other parts than the text's, and what is read below.
_READ = (
    "max_position_embeddings", "max_seq_len", "sliding_window", "moe", "yarn", "llama_4_scaling", "model_type",
    "max_batch_size", "vision_encoder", "multimodal", "causal", "ragged_attention", "use_biases", "use_cache",
)  # fmt: skip


def config_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a params.json. Raises ConfigError for what is missing, of another type, or not supported."""
    for key in ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size", "head_dim"):
        read_positive(params, key, file=PARAMS)
    for key, usual in (("causal", True), ("use_biases", False)):
        if params.get(key) not in (None, usual):
            raise ConfigError(f"{PARAMS}: {key}={shown(params[key])} is not supported", key)
    config = {name: params[key] for key, name in _KEYS.items() if params.get(key) is not None}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rms_norm_eps", 1e-5)
    config |= {"bos_token_id": 1, "eos_token_id": 2, "rope_interleaved": True}
    length = next((key for key in ("max_position_embeddings", "max_seq_len") if params.get(key) is not None), None)
    config["max_position_embeddings"] = read_positive(params, length, file=PARAMS) if length else _USUAL_LENGTH
    _read_windows(params, config)
    _read_rotary(params, config)
    if params.get("kv_lora_rank") is not None:
        _read_latent(params, config)
    else:
        _read_experts(params, config)
    # What is not known here goes on under its own name, and is judged as a key of config.json.
    return {**{key: value for key, value in params.items() if key not in (*_KEYS, *_READ)}, **config}


def _read_windows(params: Mapping[str, Any], config: dict[str, Any]) -> None:
    """One of all layers, or a list of each layer's that repeats; null: it sees everything."""
    window = params.get("sliding_window")
    if not isinstance(window, list):
        config["sliding_window"] = window
        return
    layers = config["num_hidden_layers"]
    sizes = {size for size in window if size is not None}
    if not window or layers % len(window) or len(sizes) > 1:
        raise ConfigError(
            f"{PARAMS}: sliding_window={shown(window)} must repeat evenly over {layers} layers, with one size",
            "sliding_window",
        )
    config["sliding_window"] = next(iter(sizes), None)
    kinds = ["full_attention" if size is None else "sliding_attention" for size in window]
    config["layer_types"] = kinds * (layers // len(window))


def _read_rotary(params: Mapping[str, Any], config: dict[str, Any]) -> None:
    theta = config.pop("rope_theta", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    yarn, growth = (read_section(params, key, file=PARAMS) for key in ("yarn", "llama_4_scaling"))
    if yarn:
        rope |= {"rope_type": "yarn", "factor": read(float, yarn, "factor", file=PARAMS)}
        rope["original_max_position_embeddings"] = read_positive(yarn, "original_max_position_embeddings", file=PARAMS)
        rope |= {"beta_fast": float(yarn.get("beta", 32)), "beta_slow": float(yarn.get("alpha", 1))}
        if not read(bool, yarn, "apply_scale", True, file=PARAMS):
            rope["attention_factor"] = 1.0
    config["architectures"] = ["MistralForCausalLM"]
    if growth:
        config["architectures"] = ["Ministral3ForCausalLM"]
        rope["llama_4_scaling_beta"] = read(float, growth, "beta", file=PARAMS)
        length = read_positive(growth, "original_max_position_embeddings", file=PARAMS)
        if rope.setdefault("original_max_position_embeddings", length) != length:
            raise ConfigError(
                f"{PARAMS}: original_max_position_embeddings of yarn and llama_4_scaling differ", "llama_4_scaling"
            )
    config["rope_parameters"] = rope


def _read_experts(params: Mapping[str, Any], config: dict[str, Any]) -> None:
    moe = dict(read_section(params, "moe", file=PARAMS))
    if not moe:
        return
    config["architectures"] = ["MixtralForCausalLM"]
    config["num_local_experts"] = read_positive(moe, "num_experts", file=PARAMS)
    config["num_experts_per_tok"] = read_positive(moe, "num_experts_per_tok", file=PARAMS)
    others = [key for key in moe if key not in ("num_experts", "num_experts_per_tok") and moe[key]]
    if others or "layer_types" in config:
        raise ConfigError(f"{PARAMS}: moe with {', '.join(others or ['layers of windows'])} is not supported", "moe")


_ROUTED = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "routed_scale": "routed_scaling_factor",
}
_LATENT = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OF_RUNNING = ("expert_parallel", "expert_model_parallel")


def _read_latent(params: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Mistral Small 4 and Mistral Large 3: latent attention, and experts chosen by softmax."""
    missing = [key for key in _LATENT if params.get(key) is None]
    if missing:
        raise ConfigError(f"{PARAMS}: kv_lora_rank without {', '.join(missing)} is not supported", missing[0])
    config["architectures"] = ["Mistral4ForCausalLM"]
    config["rope_interleave"] = config.pop("rope_interleaved")
    config["num_key_value_heads"] = config["num_attention_heads"]
    for key in ("head_dim", "hidden_act", "sliding_window"):
        if key != "sliding_window" or config.get(key) is None:
            config.pop(key, None)
    rope = config["rope_parameters"]
    rope.setdefault("llama_4_scaling_beta", 0.0)
    if rope["rope_type"] == "yarn" and "attention_factor" not in rope:
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    moe = dict(read_section(params, "moe", file=PARAMS))
    if not moe:
        config["first_k_dense_replace"] = config["num_hidden_layers"]
        return
    others = [key for key in moe if key not in (*_ROUTED, *_OF_RUNNING) and moe[key]]
    if [key for key in others if (key, moe[key]) != ("route_every_n", 1)]:
        raise ConfigError(f"{PARAMS}: moe with {', '.join(others)} is not supported", "moe")
    config |= {theirs: moe[key] for key, theirs in _ROUTED.items() if moe.get(key) is not None}


_NAMES = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^layers\.", "model.layers."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention\.wkv_a_with_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
    (r"\.attention\.w(q|kv)_([ab])\.", r".self_attn.\1_\2_proj."),
    (r"\.attention\.(q|kv)_a_norm\.", r".self_attn.\1_a_layernorm."),
    (r"(layers\.\d+)\.(experts\.\d+|shared_experts|gate)\.", r"\1.mlp.\2."),
    (r"(\.mlp\..*)\.w1\.", r"\1.gate_proj."),
    (r"(\.mlp\..*)\.w2\.", r"\1.down_proj."),
    (r"(\.mlp\..*)\.w3\.", r"\1.up_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.(experts|gate)\.", r".block_sparse_moe.\1."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
)
_NOT_TEXT = re.compile(r"^(?:vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\.")


def decoders_name(tensor: str) -> str | None:
    """What Hugging Face's form calls a tensor; None: it is of the vision part."""
    if _NOT_TEXT.match(tensor):
        return None
    for theirs, ours in _NAMES:
        tensor = re.sub(theirs, ours, tensor)
    return tensor
