"""StableLM 3B, 2 and 12B: layer norms, a quarter of a head that turns; side by side or one half after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention, QKNorm
from quire.layers.block import DecoderLayer, ParallelLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import HeadNorms, LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("StableLmForCausalLM", "StableLMEpochForCausalLM")
defaults = {  # as transformers has them
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {"partial_rotary_factor": 0.25}
aliases = {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(parts={"q_norm": "q_layernorm", "k_norm": "k_layernorm"})


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config, "layer_norm_eps"), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, has_qk_norm = read(bool, config, "use_qkv_bias"), read(bool, config, "qk_layernorm")
    is_parallel = read(bool, config, "use_parallel_residual")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> DecoderLayer | ParallelLayer:
        q, k = (HeadNorms(n, sizes.head_dim, sizes.eps, one_by_one=True) for n in (sizes.heads, sizes.kv_heads))
        attention = Attention(
            index, *sizes.attention, cos_sin, qkv_bias=bias, qk_norm=QKNorm(q, k) if has_qk_norm else None
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        if is_parallel:
            return ParallelLayer(attention, mlp, norm())
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), naming=NAMING)
