"""MiMo 7B: Qwen2 whose checkpoints hold layers for drafts besides, which are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.window import switched_windows

architectures = ("MiMoForCausalLM",)
defaults = {  # as its own config class has them
    "vocab_size": 151680,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "layer_types": None,
    "num_nextn_predict_layers": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None), "attention_bias": (True, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(unused=r"^model\.mtp_layers\.")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = switched_windows(config, sizes.layers, max_positions)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, window=windows[index], qkv_bias=True)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
