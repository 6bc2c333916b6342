"""GPT-J: side by side behind one layer norm, adjacent columns of a share of a head turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count
from quire.layers.attention import Attention
from quire.layers.block import ParallelLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import table_of
from quire.models.base import DecoderStack, Logits, Naming, Sizes

architectures = ("GPTJForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50400,
    "hidden_size": 4096,
    "intermediate_size": None,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rotary_dim": 64,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
aliases = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
shared = ("num_attention_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "embed_tokens": "wte",
        "layers": "h",
        "input_layernorm": "ln_1",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "up_proj": "fc_in",
        "down_proj": "fc_out",
        "norm": "ln_f",
    },
    prefix="transformer.",
    unused=r"\.attn\.(masked_)?bias$",
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config, "layer_norm_eps"), read(str, config, "hidden_act")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    cos_sin = table_of(rope, read_count(config, "rotary_dim"), sizes.head_dim, max_positions)

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> ParallelLayer:
        attention = Attention(index, *sizes.attention, cos_sin, interleaved=True)
        mlp = MLP(sizes.hidden, sizes.intermediate, act, key="activation_function")
        return ParallelLayer(attention, mlp, norm())

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=NAMING, logits=Logits(bias=True))
