"""Command R7B and A: Command R with windows in three of four layers; the others see all, and know of no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.block import ParallelLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Logits, Sizes
from quire.models.window import layer_windows, sliding_layers

architectures = ("Cohere2ForCausalLM",)
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
    "sliding_window": 4096,
    "layer_types": None,
    "sliding_window_pattern": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, "layer_norm_eps")
    cos_sin, still = rotary_table(config, sizes.head_dim, max_positions), no_rotation(max_positions, sizes.head_dim)
    pattern = read_positive(config, "sliding_window_pattern", 4)
    windows = layer_windows(config, sizes.layers, max_positions, pattern=pattern)
    slides = sliding_layers(config, sizes.layers, pattern)
    bias, act = read(bool, config, "attention_bias"), read(str, config, "hidden_act")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps, bias=False)

    def layer(index: int) -> ParallelLayer:
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin if slides[index] else still,
            window=windows[index],
            qkv_bias=bias,
            out_bias=bias,
            interleaved=True,
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return ParallelLayer(attention, mlp, norm())

    tied, logits = read(bool, config, "tie_word_embeddings"), Logits(scale=read(float, config, "logit_scale"))
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), logits=logits)
