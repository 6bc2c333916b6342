"""HunYuan with experts: HunYuan's attention, experts chosen by softmax, and one for every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.attention import Attention, QKNorm
from quire.layers.experts import MixtureOfExperts, Router, Rule, SparseLayer
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.moe.reading import SparseStack, chosen

architectures = ("HunYuanMoEV1ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "num_experts": 1,
    "moe_topk": 1,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_qk_norm": (True, None),
    "use_cla": (False, None),
    "use_mixed_mlp_moe": (True, None),
}
rotary = {"alpha": 0.0}
aliases = {"num_local_experts": "num_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(parts={"q_norm": "query_layernorm", "k_norm": "key_layernorm"})
RENAMED = {"mlp.gate.wg.weight": "mlp.gate.weight"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, inner = read(bool, config, "attention_bias"), sizes.intermediate

    def norm() -> RMSNorm:
        return RMSNorm(sizes.head_dim, sizes.eps)

    def layer(index: int) -> SparseLayer:
        attention = Attention(
            index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, qk_norm=QKNorm(norm(), norm(), on="turned")
        )
        router = Router(sizes.hidden, _rule(config, index, sizes.layers), dtype=torch.float32)
        mlp = MixtureOfExperts(sizes.hidden, inner, router, shared=inner, shared_name="shared_mlp")
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    tied = read(bool, config, "tie_word_embeddings")
    return SparseStack(sizes, layer, tied=tied, naming=NAMING, renamed=RENAMED)


def _rule(config: Mapping[str, Any], index: int, layers: int) -> Rule:
    """`moe_topk` may be a number a layer. Raises ConfigError for a list of another length."""
    top_k = config["moe_topk"]
    if isinstance(top_k, list):
        if len(top_k) != layers:
            raise ConfigError(f"config.json: moe_topk must have a number a layer, got {shown(top_k)}", "moe_topk")
        top_k = top_k[index]
    experts, top_k = chosen({**config, "moe_topk": top_k}, "num_experts", "moe_topk")
    return Rule(experts, top_k, renormalize=True)
