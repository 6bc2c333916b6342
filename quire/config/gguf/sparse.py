"""Families of GGUF files with experts, and those with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.gguf.family import WHOLE_LATENT, GgufFamily
from quire.config.gguf.metadata import Metadata
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufTensor
from quire.foundation.json_file import shown

_NORMED: dict[str, tuple[Any, ...]] = {"expert_weights_norm": (True,)}
SIGMOID = 2  # of expert_gating_func
_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_LOCAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_ROUTED = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}  # fmt: skip
_SHARED_GATE = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_CORRECTED = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
_NUMBERED = {
    "ffn_gate_exps": "mlp.experts.{}.w1", "ffn_up_exps": "mlp.experts.{}.w3", "ffn_down_exps": "mlp.experts.{}.w2",
}  # fmt: skip
_LATENT = {
    **_CORRECTED, "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_kv_b": WHOLE_LATENT,
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_k_b": WHOLE_LATENT, "attn_v_b": WHOLE_LATENT,
}  # fmt: skip


def _routing(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """How DeepSeek's kin weigh their experts."""
    del tensors
    config["routed_scaling_factor"] = float(metadata.get("expert_weights_scale") or 1.0)
    config["norm_topk_prob"] = bool(metadata.get("expert_weights_norm", False))


def _glm(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    _routing(metadata, config, tensors)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors


def _latent(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Newer files count the latent row as the one key head, and say the sizes of real ones beside it.

    Raises ConfigError for sizes that are none.
    """
    _routing(metadata, config, tensors)
    rope = metadata.number("rope.dimension_count")
    sizes = [metadata.get(f"attention.{which}_length_mla") for which in ("key", "value")]
    older = [metadata.get(f"attention.{which}_length") for which in ("key", "value")]
    key, value = older if None in sizes else sizes
    if not isinstance(key, int) or not isinstance(value, int) or key <= rope:
        raise ConfigError(
            f"the GGUF file's heads of {shown(key)} and {shown(value)} columns, {rope} of which turn, cannot be",
            "model",
        )
    config |= {
        "num_key_value_heads": config["num_attention_heads"], "qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope,
        "v_head_dim": value, "kv_lora_rank": metadata.number("attention.kv_lora_rank"),
        "q_lora_rank": metadata.get("attention.q_lora_rank") or None,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors,
    }  # fmt: skip


def _v2(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    _latent(metadata, config, tensors)
    config["topk_method"] = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"


def _llama4(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """What the files leave unsaid is as in the models that there are: chunks of 8192, every fourth layer without
    positions and with queries that grow, norms of queries but with 128 experts. A window of 0 says: none of it."""
    del tensors
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config["intermediate_size"] = metadata.number("expert_feed_forward_length")
    config["interleave_moe_layer_step"] = metadata.get("interleave_moe_layer_step", 1)
    config["use_qk_norm"] = config.get("num_local_experts") != 128
    if metadata.get("attention.sliding_window") == 0:
        layers = config["num_hidden_layers"]
        config |= {
            "layer_types": ["full_attention"] * layers, "no_rope_layers": [1] * layers,
            "attn_temperature_tuning": False,
        }  # fmt: skip


def _ernie(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """The size of shared experts is theirs of all, whatever is said of it."""
    del config, tensors
    metadata.get("expert_shared_feed_forward_length")


def _hunyuan(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Raises ConfigError unless the shared expert is as large as the others, as in our family."""
    del tensors
    inner, shared = metadata.number("expert_feed_forward_length"), metadata.get("expert_shared_feed_forward_length")
    if shared not in (None, inner) or metadata.get("expert_shared_count", 1) != 1:
        raise ConfigError(
            f"a shared expert of expert_shared_feed_forward_length={shown(shared)} beside experts of {inner}, or more "
            "than one, is not supported",
            "model",
        )
    config["intermediate_size"] = inner


def _inner(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """The size of the experts is the one of the model."""
    del tensors
    config["intermediate_size"] = metadata.get("expert_feed_forward_length", config["intermediate_size"])


def _phimoe(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    del metadata
    config["lm_head_bias"] = "output.bias" in tensors


DEEPSEEK_V2 = GgufFamily(
    "DeepseekV2ForCausalLM", _LATENT, keys=_ROUTED, bias=None, latent=True, ahead=True, sharpened=10.0, read=_v2
)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, architecture="DeepseekV3ForCausalLM", neutral={"expert_gating_func": (SIGMOID,)},
                      fixed={"n_group": 1, "topk_group": 1}, read=_latent)  # fmt: skip
MIXTRAL = GgufFamily("MixtralForCausalLM", _NUMBERED, pairs=True, keys=_LOCAL, bias=None, neutral=_NORMED)
SPARSE: dict[str, GgufFamily] = {
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM", _SHARED_GATE,
        keys={**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False}, bias="qkv_bias", neutral={"expert_weights_norm": (False,)},
    ),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM", keys=_EXPERTS, fixed={"norm_topk_prob": True}, sized=True,
        neutral=_NORMED,
    ),
    "olmoe": GgufFamily(
        "OlmoeForCausalLM", keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fixed={"norm_topk_prob": False}, neutral={"expert_weights_norm": (False,)},
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router", "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.up_proj_bias", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        keys=_LOCAL, windows=True, sized=True, neutral={**_NORMED, "expert_gating_func": (0, 1, 3)}, read=_inner,
    ),
    "deepseek2": DEEPSEEK_V2,
    "llama4": GgufFamily(
        "Llama4ForCausalLM",
        {
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps": "feed_forward.experts.{}.gate_proj", "ffn_up_exps": "feed_forward.experts.{}.up_proj",
            "ffn_down_exps": "feed_forward.experts.{}.down_proj",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        keys=_LOCAL, sized=True, neutral={"expert_gating_func": (SIGMOID,), "expert_shared_count": (1,)}, read=_llama4,
        fixed={
            "attention_chunk_size": 8192, "no_rope_layer_interval": 4, "attn_temperature_tuning": True,
            "attn_scale": 0.1, "floor_scale": 8192,
        },
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM", {**_CORRECTED, "post_attention_norm": "post_attention_layernorm"}, keys=_ROUTED,
        fixed={"n_group": 1, "topk_group": 1}, partial=True, sized=True, ahead=True,
        neutral={"expert_gating_func": (SIGMOID,)}, read=_glm,
    ),
    "dots1": GgufFamily(
        "Dots1ForCausalLM", _CORRECTED, keys=_ROUTED, fixed={"n_group": 1, "topk_group": 1, "sliding_window": None},
        sized=True, neutral={"expert_gating_func": (SIGMOID,)}, read=_routing,
    ),
    "ernie4_5-moe": GgufFamily(
        "Ernie4_5_MoeForCausalLM",
        {**_CORRECTED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        keys={
            "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index", "interleave_moe_layer_step": "moe_layer_interval",
        },
        bias="use_bias", sized=True, lifted={"exp_probs_b": (0, 2)}, neutral=_NORMED, read=_ernie,
    ),
    "hunyuan-moe": GgufFamily(
        "HunYuanMoEV1ForCausalLM",
        {
            "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        keys={"expert_count": "num_experts", "expert_used_count": "moe_topk"}, sized=True, neutral=_NORMED,
        read=_hunyuan,
    ),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM", pairs=True, neutral=_NORMED,
        keys={
            **_LOCAL, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
    ),
    "phimoe": GgufFamily(
        "PhimoeForCausalLM", _NUMBERED, keys=_LOCAL,
        windows=True, read=_phimoe,
    ),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM",
        {**_NUMBERED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        keys=_LOCAL, bias=None, partial=True, sized=True, neutral={**_NORMED, "expert_gating_func": (SIGMOID,)},
        read=_inner,
    ),
}  # fmt: skip
