"""HunYuan, dense: Llama with norms of query and key heads behind the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention, QKNorm
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("HunYuanDenseV1ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 290943,
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
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_qk_norm": (True, None),
    "use_cla": (False, None),
}
rotary = {"alpha": 0.0}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(parts={"q_norm": "query_layernorm", "k_norm": "key_layernorm"})


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias = read(bool, config, "attention_bias")

    def norm() -> RMSNorm:
        return RMSNorm(sizes.head_dim, sizes.eps)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, qk_norm=QKNorm(norm(), norm(), on="turned")
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
