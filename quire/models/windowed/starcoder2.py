"""StarCoder2: layer norms, a plain feed-forward, biases, windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.window import layer_windows

architectures = ("Starcoder2ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": None,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "sliding_window": None,
    "use_bias": True,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "norm_type": ("layer_norm", None),
    "mlp_type": ("default", None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(parts={"up_proj": "c_fc", "down_proj": "c_proj"})


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config, "norm_epsilon"), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = layer_windows({**config, "layer_types": None}, sizes.layers, max_positions)
    bias = read(bool, config, "use_bias")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, window=windows[index], qkv_bias=bias, out_bias=bias)
        mlp = MLP(sizes.hidden, sizes.intermediate, act, bias=bias)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=NAMING)
