"""EXAONE 4: norms behind both halves and of query and key heads; layers that see all know of no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.block import OuterNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.window import layer_windows, sliding_layers

architectures = ("Exaone4ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "sliding_window": 4096,
    "layer_types": None,
    "sliding_window_pattern": 4,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    tables, windows = seen_by(config, sizes, rotary_table(config, sizes.head_dim, max_positions))
    act = read(str, config, "hidden_act")

    def layer(index: int) -> OuterNormLayer:
        attention = Attention(
            index,
            *sizes.attention,
            tables[index],
            window=windows[index],
            qk_norm_eps=sizes.eps,
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        after = RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps)
        return OuterNormLayer(attention, mlp, after=after)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))


def seen_by(
    config: Mapping[str, Any], sizes: Sizes, cos_sin: torch.Tensor
) -> tuple[list[torch.Tensor], list[int | None]]:
    """Each layer's rotary table and window: where some have windows, those that see all know of no positions."""
    slides = [False] * sizes.layers
    if config["sliding_window"] is not None:
        pattern = 1 if config["layer_types"] else read_positive(config, "sliding_window_pattern")
        slides = sliding_layers(config, sizes.layers, pattern)
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    windows = layer_windows({**config, "layer_types": kinds}, sizes.layers, len(cos_sin))
    still = no_rotation(len(cos_sin), sizes.head_dim)
    turns_all = config["sliding_window"] is None
    return [cos_sin if turns_all or slide else still for slide in slides], windows
