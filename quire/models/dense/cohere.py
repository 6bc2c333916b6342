"""Command R: attention and feed-forward side by side behind one layer norm, adjacent columns turned, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention, QKNorm
from quire.layers.block import ParallelLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import HeadNorms, LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Sizes

architectures = ("CohereForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "use_qk_norm": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {"rope_theta": 500000.0}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, "layer_norm_eps")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, act = read(bool, config, "attention_bias"), read(str, config, "hidden_act")
    has_qk_norm = read(bool, config, "use_qk_norm")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps, bias=False)

    def layer(index: int) -> ParallelLayer:
        q, k = (HeadNorms(heads, sizes.head_dim, sizes.eps) for heads in (sizes.heads, sizes.kv_heads))
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(q, k) if has_qk_norm else None,
            interleaved=True,
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return ParallelLayer(attention, mlp, norm())

    tied, logits = read(bool, config, "tie_word_embeddings"), Logits(scale=read(float, config, "logit_scale"))
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), logits=logits)
