"""DeepSeek-V2, V2-Lite and V2.5: latent attention, experts chosen by softmax, of all or of the best groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.layers.experts import Rule, SparseLayer
from quire.models.base import DecoderStack, Sizes
from quire.models.latent.reading import feed_forward, latent_attention
from quire.models.moe.reading import SparseStack, grouped_rule, later_layers

architectures = ("DeepseekV2ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,  # this one and the next follow from others
    "qk_head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "num_experts_per_tok": None,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
    "first_k_dense_replace": 0,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "scoring_func": ("softmax", None),
    "norm_topk_prob": (False, None),
    "moe_layer_freq": (1, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_experts": "n_routed_experts"}
shared = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    attention = latent_attention(config, sizes, max_positions, interleaved=True)
    bias, sparse = read(bool, config, "mlp_bias"), later_layers(config, sizes.layers)
    mlp = feed_forward(config, sizes, _rule(config), sparse, correction=None, bias=bias)

    def layer(index: int) -> SparseLayer:
        return SparseLayer(attention(index), mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))


def _rule(config: Mapping[str, Any]) -> Rule:
    """A group is as good as its best expert. Raises ConfigError for another way to choose."""
    method = read(str, config, "topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"config.json: topk_method must be greedy or group_limited_greedy, got {method!r}", "topk_method"
        )
    open_to = config if method == "group_limited_greedy" else {**config, "n_group": None, "topk_group": None}
    return grouped_rule(open_to, "n_routed_experts", scoring="softmax", group_best=1, renormalize=False)
