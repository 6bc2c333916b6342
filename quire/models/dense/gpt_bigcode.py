"""StarCoder and SantaCoder: GPT-2 with one key and value head for all queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import no_rotation
from quire.models.base import DecoderStack, Naming, Sizes, learned_positions

architectures = ("GPTBigCodeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": None,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 1024,
    "layer_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "multi_query": True,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "attention_softmax_in_fp32": (True, False, None),
    "scale_attention_softmax_in_fp32": (True, False, None),
}
shared = ("num_attention_heads", "intermediate_size")
aliases = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
NAMING = Naming(
    parts={
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "layers": "h",
        "input_layernorm": "ln_1",
        "self_attn": "attn",
        "o_proj": "c_proj",
        "post_attention_layernorm": "ln_2",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
        "norm": "ln_f",
    },
    prefix="transformer.",
    unused=r"\.attn\.(masked_)?bias$",
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, "layer_norm_eps")
    if read(bool, config, "multi_query"):
        sizes = replace(sizes, kv_heads=1)
    still, act = no_rotation(max_positions, sizes.head_dim), read(str, config, "hidden_act")
    scale = sizes.head_dim**-0.5 if read(bool, config, "scale_attn_weights") else 1.0

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=True, fused="c_attn", by_head=True)
        attention = Attention(index, *sizes.attention, still, scale=scale, qkv=qkv, out_bias=True)
        mlp = MLP(sizes.hidden, sizes.intermediate, act, key="activation_function")
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    tied, positions = read(bool, config, "tie_word_embeddings"), learned_positions(config, max_positions)
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=NAMING, positions=positions)
