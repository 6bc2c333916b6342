"""EXAONE 3 and 3.5: Llama by other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("ExaoneForCausalLM",)
defaults = {  # as its own config class has them
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": None,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
aliases = {"num_layers": "num_hidden_layers", "activation_function": "hidden_act"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "embed_tokens": "wte",
        "layers": "h",
        "input_layernorm": "ln_1",
        "self_attn": "attn.attention",
        "o_proj": "out_proj",
        "post_attention_layernorm": "ln_2",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
        "norm": "ln_f",
    },
    prefix="transformer.",
    unused=r"\.rotary\.inv_freq$",
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config, "layer_norm_epsilon"), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
