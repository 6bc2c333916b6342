"""Baichuan 1 and 2: Llama with one projection for q, k and v. The 7B have rotary positions, the 13B a slope a head on
how far away tokens are (ALiBi); the second generation divides each of the head's rows by its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.head_terms import alibi_slopes
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("BaichuanForCausalLM", "BaiChuanForCausalLM")
defaults = {  # as its own config class has them
    "vocab_size": 64000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "rope_parameters": None,
}
fixed = {"hidden_act": ("silu", "swish"), "is_causal": (True, None), "is_encoder_decoder": (False, None)}
aliases = {"model_max_length": "max_position_embeddings"}
shared = ("num_attention_heads", "intermediate_size")

ROTARY_HIDDEN = 4096  # of the 7B; a config does not say it otherwise
SECOND_VOCAB = 125696  # of the second generation, likewise


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    slopes, cos_sin = None, rotary_table(config, sizes.head_dim, max_positions)
    if sizes.hidden != ROTARY_HIDDEN and config["architectures"][0].startswith("Baichuan"):
        slopes, cos_sin = alibi_slopes(sizes.heads), no_rotation(max_positions, sizes.head_dim)

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=False, fused="W_pack")
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, slopes=slopes)
        return DecoderLayer(attention, GatedMLP(sizes.hidden, sizes.intermediate), sizes.hidden, sizes.eps)

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, unit_head=sizes.vocab == SECOND_VOCAB)
