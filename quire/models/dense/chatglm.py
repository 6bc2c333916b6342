"""ChatGLM 2 and 3, and GLM-4 9B as it was first published: GLM by other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import table_of
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
defaults = {  # as its own config class has them
    "vocab_size": 65024,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "add_qkv_bias": False,
    "multi_query_attention": False,
    "multi_query_group_num": 1,
    "rope_ratio": 1.0,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "rmsnorm": (True, None),
    "post_layer_norm": (True, None),
    "add_bias_linear": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "original_rope": (True, None),
}
shared = ("num_attention_heads", "multi_query_group_num", "intermediate_size")
aliases = {
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}
NAMING = Naming(
    parts={
        "embed_tokens": "embedding.word_embeddings",
        "layers": "encoder.layers",
        "self_attn": "self_attention",
        "o_proj": "dense",
        "down_proj": "dense_4h_to_h",
        "norm": "encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
    },
    prefix="transformer.",
    unused=r"\.rotary_pos_emb\.inv_freq$",
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    if read(bool, config, "multi_query_attention"):
        sizes = replace(sizes, kv_heads=read_positive(config, "multi_query_group_num"))
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(f"config.json: {sizes.heads} heads are no multiple of multi_query_group_num={sizes.kv_heads}")
    rope = {"rope_type": "default", "rope_theta": 10000.0 * read(float, config, "rope_ratio")}
    cos_sin = table_of(rope, sizes.head_dim // 2, sizes.head_dim, max_positions)
    bias = read(bool, config, "add_qkv_bias")

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=bias, fused="query_key_value")
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, interleaved=True)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, fused="dense_h_to_4h")
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
