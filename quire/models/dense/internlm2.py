"""InternLM 2 and 2.5: Llama with queries, keys and values together, by key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("InternLM2ForCausalLM",)
defaults = {  # as its own config class has them
    "vocab_size": 103168,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "bias": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "embed_tokens": "tok_embeddings",
        "self_attn": "attention",
        "o_proj": "wo",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "bias")

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=bias, fused="wqkv", by_head=True)
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, out_bias=bias)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
