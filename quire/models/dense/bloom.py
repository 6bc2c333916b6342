"""BLOOM: no positions but by a slope a head on how far away tokens are (ALiBi), and a norm behind the embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.head_terms import alibi_slopes
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import no_rotation
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("BloomForCausalLM",)
defaults = {  # as transformers has them; it knows of no longest request
    "vocab_size": 250880,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "slow_but_exact": (False, True, None),
}
aliases = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embed": "hidden_size",
    "seq_length": "max_position_embeddings",
}
shared = ("num_attention_heads",)
NAMING = Naming(
    parts={
        "embed_tokens": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "layers": "h",
        "self_attn": "self_attention",
        "o_proj": "dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
        "norm": "ln_f",
    },
    prefix="transformer.",
    is_optional=True,
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, "layer_norm_epsilon")
    still, slopes = no_rotation(max_positions, sizes.head_dim), alibi_slopes(sizes.heads)

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=True, fused="query_key_value", by_head=True)
        attention = Attention(index, *sizes.attention, still, qkv=qkv, out_bias=True, slopes=slopes)
        mlp = MLP(sizes.hidden, sizes.intermediate, "gelu_new")
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=NAMING, embed_norm=norm())
