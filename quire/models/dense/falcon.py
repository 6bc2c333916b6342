"""Falcon 7B, 40B, 180B and RefinedWeb: side by side behind one layer norm or two, or one half after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer, ParallelLayer
from quire.layers.head_terms import alibi_slopes
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("FalconForCausalLM", "RWForCausalLM")
defaults = {  # as transformers has them
    "vocab_size": 65024,
    "hidden_size": 4544,
    "intermediate_size": None,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "num_kv_heads": None,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "num_ln_in_parallel_attn": None,
    "bias": False,
    "alibi": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_kv_heads", "intermediate_size")
aliases = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
}
PARTS = {
    "embed_tokens": "word_embeddings",
    "layers": "h",
    "self_attn": "self_attention",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "ln_f",
}
TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config, "layer_norm_epsilon"), read(str, config, "hidden_act")
    is_new, is_parallel = read(bool, config, "new_decoder_architecture"), read(bool, config, "parallel_attn")
    if is_new and not is_parallel:
        raise ConfigError("config.json: parallel_attn=false does not go with new_decoder_architecture", "parallel_attn")
    if is_new:
        sizes = replace(sizes, kv_heads=read_positive(config, "num_kv_heads", sizes.heads))
    elif read(bool, config, "multi_query"):
        sizes = replace(sizes, kv_heads=1)
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(f"config.json: {sizes.heads} heads are no multiple of num_kv_heads={sizes.kv_heads}")
    has_two_norms = is_new and read_positive(config, "num_ln_in_parallel_attn", 2) == 2
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "bias")
    slopes = None
    if read(bool, config, "alibi"):  # scaled as products are
        cos_sin = no_rotation(max_positions, sizes.head_dim)
        slopes = [slope * sizes.head_dim**-0.5 for slope in alibi_slopes(sizes.heads)]

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> DecoderLayer | ParallelLayer:
        qkv = Linear.qkv(*sizes.attention, bias=bias, fused="query_key_value", by_head=True)
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, out_bias=bias, slopes=slopes)
        mlp = MLP(sizes.hidden, sizes.intermediate, act, bias=bias, key="activation")
        if is_parallel:
            return ParallelLayer(attention, mlp, norm(), norm() if has_two_norms else None)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    naming = Naming(parts={**PARTS, **(TWO_NORMS if has_two_norms else {})}, prefix="transformer.")
    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=naming)
