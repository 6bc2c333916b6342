"""LFM2: short convolutions in most layers, attention in some; behind either a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.config.reading import MAX_SIZE, read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import FeedForward
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import HybridLayer
from quire.layers.recurrent.short_conv import ShortConv
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import kinds_of_layers
from quire.models.moe.reading import SparseStack

architectures = ("Lfm2ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
    "layer_types": None,
}
fixed = {"is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "hidden_size")
aliases = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
rotary = {"rope_theta": 1000000.0}
KINDS = {"conv": "conv", "full_attention": "self_attn"}
NAMES = {
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "o_proj": "out_proj", "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
}  # fmt: skip


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, eps="norm_eps")
    inner = sizes.intermediate
    if read(bool, config, "block_auto_adjust_ff_dim"):
        step = read_positive(config, "block_multiple_of")
        factor = read(float, config, "block_ffn_dim_multiplier")
        if not 1 <= factor * int(2 * inner / 3) <= MAX_SIZE:
            raise ConfigError(
                f"config.json: block_ffn_dim_multiplier={factor:g} makes no feed-forward layer of "
                f"intermediate_size={inner}",
                "block_ffn_dim_multiplier",
            )
        inner = int(factor * int(2 * inner / 3))
        inner = step * -(-inner // step)
    return stack(config, max_positions, sizes, _kinds(config, sizes.layers), lambda _: GatedMLP(sizes.hidden, inner))


def stack(
    config: Mapping[str, Any], max_positions: int, sizes: Sizes, kinds: list[str], mlp: Callable[[int], FeedForward]
) -> DecoderStack:
    """kinds: of the layers. mlp: makes the feed-forward layer of a number."""
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    taps, bias = read_count(config, "conv_L_cache", least=2), read(bool, config, "conv_bias")

    def layer(index: int) -> HybridLayer:
        mixer: Attention | ShortConv = ShortConv(index, sizes.hidden, taps, bias=bias)
        if kinds[index] == "self_attn":
            mixer = Attention(index, *sizes.attention, cos_sin, qk_norm_eps=sizes.eps)
        norms = (RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps))
        named = (("operator_norm", norms[0]), ("ffn_norm", norms[1]))
        return HybridLayer((kinds[index], mixer), ("feed_forward", mlp(index)), named)

    return SparseStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        naming=Naming(parts=NAMES, trunk={"norm": "embedding_norm"}),
        renamed={".feed_forward.expert_bias": ".feed_forward.gate.expert_bias"},
    )


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """By name, or by the numbers of the layers that attend; all, if nothing is said."""
    if config["layer_types"] is not None:
        return kinds_of_layers(config, "layer_types", KINDS, layers)
    attends = config["full_attn_idxs"]
    if attends is not None and not (isinstance(attends, list) and all(type(number) is int for number in attends)):
        raise ConfigError("config.json: full_attn_idxs must be a list of layers' numbers", "full_attn_idxs")
    return ["self_attn" if attends is None or index in attends else "conv" for index in range(layers)]
