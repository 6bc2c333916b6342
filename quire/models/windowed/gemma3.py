"""Gemma 3, the text alone: Gemma 2 with norms of query and key heads, and a base of its own for layers with windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention, QKNorm
from quire.layers.block import OuterNormLayer
from quire.layers.embedding import rounded
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Sizes
from quire.models.window import layer_windows, sliding_layers

architectures = ("Gemma3ForCausalLM", "Gemma3TextForCausalLM")
defaults = {  # as transformers has them
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window_pattern": None,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "attn_logit_softcapping": (None,),
}
rotary = {"full_attention": {"rope_theta": 1000000.0}, "sliding_attention": {"rope_theta": 10000.0}}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    pattern = read_positive(config, "sliding_window_pattern", 6)
    window = config["sliding_window"]
    if config.get("use_bidirectional_attention") and window is not None:
        window = read_positive(config, "sliding_window") // 2  # to either side (EmbeddingGemma)
    windows = layer_windows({**config, "sliding_window": window}, sizes.layers, max_positions, pattern=pattern)
    slides = sliding_layers(config, sizes.layers, pattern)
    full, sliding = (
        rotary_table(config, sizes.head_dim, max_positions, f"{kind}_attention") for kind in ("full", "sliding")
    )
    bias, act = read(bool, config, "attention_bias"), read(str, config, "hidden_activation")
    scale = read_positive(config, "query_pre_attn_scalar") ** -0.5

    def norm(size: int = sizes.hidden) -> RMSNorm:
        return RMSNorm(size, sizes.eps, plus_one=True)

    def layer(index: int) -> OuterNormLayer:
        attention = Attention(
            index,
            *sizes.attention,
            sliding if slides[index] else full,
            window=windows[index],
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(norm(sizes.head_dim), norm(sizes.head_dim)),
            scale=scale,
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return OuterNormLayer(attention, mlp, before=(norm(), norm()), after=(norm(), norm()))

    logits = Logits(softcap=read(float, config, "final_logit_softcapping", 0.0))
    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), logits=logits, embedding_scale=rounded(sizes.hidden**0.5))
