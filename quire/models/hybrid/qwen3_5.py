"""Qwen3.5's text models: Qwen3-Next's layers, with a feed-forward layer behind each, and separate projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.layers.linear import Linear, Stored
from quire.layers.mlp import GatedMLP
from quire.layers.recurrent.delta_net import DeltaSizes, GatedDeltaNet
from quire.models.base import DecoderStack, Sizes
from quire.models.hybrid.qwen3_next import stack
from quire.models.hybrid.reading import delta_sizes

architectures = ("Qwen3_5ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": None,
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None), "attn_output_gate": (True, None)}
shared = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
rotary = {"partial_rotary_factor": 0.25}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, states = Sizes.read(config), delta_sizes(config)

    def linear(index: int) -> GatedDeltaNet:
        return GatedDeltaNet(index, states, separate(states))

    return stack(config, max_positions, sizes, linear, lambda _: GatedMLP(sizes.hidden, sizes.intermediate))


def separate(sizes: DeltaSizes) -> Linear:
    """Checkpoints have queries, keys and values in one matrix, and the others in one each."""
    parts = sizes.parts
    keys, values = parts["k"], parts["v"]
    lines = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, 2 * keys + values)}
    stored = {part: Stored("in_proj_qkv", 2 * keys + values, (pair,)) for part, pair in lines.items()}
    for part in ("z", "b", "a"):
        stored[part] = Stored(f"in_proj_{part}", parts[part], ((0, parts[part]),))
    return Linear(
        sizes.hidden, sum(parts.values()), bias=False, parts=parts, role="rows", heads=sizes.heads_of_parts,
        stored=stored,
    )  # fmt: skip
