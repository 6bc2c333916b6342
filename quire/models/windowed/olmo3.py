"""OLMo 3: OLMo 2 with windows in three of four layers, and rotary settings by kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention, QKNorm
from quire.layers.block import OuterNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.window import layer_windows, sliding_layers

architectures = ("Olmo3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "sliding_window": 4096,
    "layer_types": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
rotary = {"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 500000.0}}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    windows = layer_windows(config, sizes.layers, max_positions, pattern=4)
    slides = sliding_layers(config, sizes.layers, 4)
    full, sliding = (
        rotary_table(config, sizes.head_dim, max_positions, f"{kind}_attention") for kind in ("full", "sliding")
    )
    bias, act = read(bool, config, "attention_bias"), read(str, config, "hidden_act")

    def norm(size: int = sizes.hidden) -> RMSNorm:
        return RMSNorm(size, sizes.eps)

    def layer(index: int) -> OuterNormLayer:
        q, k = norm(sizes.heads * sizes.head_dim), norm(sizes.kv_heads * sizes.head_dim)
        attention = Attention(
            index,
            *sizes.attention,
            sliding if slides[index] else full,
            window=windows[index],
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(q, k, on="width"),
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return OuterNormLayer(attention, mlp, after=(norm(), norm()))

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
