"""GPT-NeoX and Pythia: side by side behind a layer norm each, queries, keys and values together head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer, ParallelLayer
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("GPTNeoXForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "use_parallel_residual": True,
    "attention_bias": True,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None), "is_decoder": (False, True, None)}
rotary = {"partial_rotary_factor": 0.25}
aliases = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
shared = ("num_attention_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "embed_tokens": "embed_in",
        "self_attn": "attention",
        "o_proj": "dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
        "norm": "final_layer_norm",
        "lm_head": "embed_out",
    },
    prefix="gpt_neox.",
    unused=r"\.attention\.(masked_)?bias$",
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config, "layer_norm_eps"), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, is_parallel = read(bool, config, "attention_bias"), read(bool, config, "use_parallel_residual")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> DecoderLayer | ParallelLayer:
        qkv = Linear.qkv(*sizes.attention, bias=bias, fused="query_key_value", by_head=True)
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, out_bias=bias)
        mlp = MLP(sizes.hidden, sizes.intermediate, act)
        if is_parallel:
            return ParallelLayer(attention, mlp, norm(), norm())
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=NAMING)
