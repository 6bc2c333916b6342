"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward side by side behind one layer norm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention, QKNorm
from quire.layers.block import ParallelLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Naming, Sizes

architectures = ("PhiForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "qk_layernorm": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {"partial_rotary_factor": 0.5}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "norm": "final_layernorm",
        "o_proj": "dense",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config, "layer_norm_eps"), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    has_qk_norm = read(bool, config, "qk_layernorm")

    def norm(size: int = sizes.hidden) -> LayerNorm:
        return LayerNorm(size, sizes.eps)

    def layer(index: int) -> ParallelLayer:
        qk_norm = QKNorm(norm(sizes.head_dim), norm(sizes.head_dim)) if has_qk_norm else None
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=True, out_bias=True, qk_norm=qk_norm)
        return ParallelLayer(attention, MLP(sizes.hidden, sizes.intermediate, act), norm())

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=NAMING, logits=Logits(bias=True))
