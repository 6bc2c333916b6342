"""OLMo Hybrid: gated delta rule in three layers of four; in the others OLMo 2's attention, which may
know no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention, QKNorm
from quire.layers.block import OuterNormLayer
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import HybridLayer
from quire.layers.recurrent.delta_net import DeltaSizes, GatedDeltaNet
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import delta_sizes, kinds_of_layers
from quire.models.moe.reading import SparseStack

architectures = ("OlmoHybridForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "layer_types": None,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
fixed = {"hidden_act": ("silu", "swish"), "is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
rotary = {"may_be_none": True}
KINDS = {"linear_attention": "linear_attn", "full_attention": "self_attn"}
PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "z": "g_proj", "b": "b_proj", "a": "a_proj"}
RENAMED = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}
GATED_EPS = 1e-5


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, states = Sizes.read(config), _delta(config)
    kinds = ["self_attn" if index % 4 == 3 else "linear_attn" for index in range(sizes.layers)]
    if "self_attn" not in kinds:
        kinds[-1] = "self_attn"
    if config["layer_types"] is not None:
        kinds = kinds_of_layers(config, "layer_types", KINDS, sizes.layers)
    if config["rope_parameters"]["rope_type"] == "none":
        cos_sin = no_rotation(max_positions, sizes.head_dim)
    else:
        cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias = read(bool, config, "attention_bias")

    def norm(size: int = sizes.hidden) -> RMSNorm:
        return RMSNorm(size, sizes.eps)

    def layer(index: int) -> nn.Module:
        mlp = GatedMLP(sizes.hidden, sizes.intermediate)
        if kinds[index] == "linear_attn":
            named = (("input_layernorm", norm()), ("post_attention_layernorm", norm()))
            return HybridLayer(("linear_attn", GatedDeltaNet(index, states, _projection(states))), ("mlp", mlp), named)
        norms = QKNorm(norm(sizes.heads * sizes.head_dim), norm(sizes.kv_heads * sizes.head_dim), on="width")
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, qk_norm=norms)
        return OuterNormLayer(attention, mlp, after=(norm(), norm()))

    naming = Naming(parts={"norm": "o_norm", "out_proj": "o_proj"}, trunk={"norm": "norm"})
    tied = read(bool, config, "tie_word_embeddings")
    return SparseStack(sizes, layer, tied=tied, naming=naming, renamed=RENAMED)


def _delta(config: Mapping[str, Any]) -> DeltaSizes:
    """Keys three quarters as wide as the model, values twice that, if nothing else is said."""
    hidden, heads = read_positive(config, "hidden_size"), read_positive(config, "num_attention_heads")
    told = dict(config)
    for kind in ("key", "value"):
        told[f"linear_num_{kind}_heads"] = read_positive(config, f"linear_num_{kind}_heads", heads)
    usual = int(0.75 * hidden / told["linear_num_key_heads"])
    told["linear_key_head_dim"] = read_positive(config, "linear_key_head_dim", usual)
    told["linear_value_head_dim"] = read_positive(config, "linear_value_head_dim", 2 * told["linear_key_head_dim"])
    sizes = delta_sizes(told)
    convs = {f"{part}_conv1d": sizes.parts[part] for part in "qkv"}
    most = 2.0 if read(bool, config, "linear_allow_neg_eigval") else 1.0
    return replace(sizes, eps=GATED_EPS, conv_parts=convs, most=most)


def _projection(sizes: DeltaSizes) -> Linear:
    parts = {PARTS[part]: count for part, count in sizes.parts.items()}
    heads = sizes.heads_of_parts
    return Linear(sizes.hidden, sum(parts.values()), bias=False, parts=parts, role="rows", heads=heads)
