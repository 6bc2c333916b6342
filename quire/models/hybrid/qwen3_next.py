"""Qwen3-Next: gated delta rule in three layers of four, gated attention in the others, experts behind either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import QKNorm
from quire.layers.experts import MixtureOfExperts, Router
from quire.layers.gated_attention import GatedAttention
from quire.layers.linear import Linear, Stored, stacked
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import HybridLayer
from quire.layers.recurrent.delta_net import DeltaSizes, GatedDeltaNet
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import delta_sizes, kinds_of_layers
from quire.models.moe.reading import sparse_layers, top_k_rule

architectures = ("Qwen3NextForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
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
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "split_projections": None,  # of GGUF files: see `by_kind`
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None), "attn_output_gate": (True, None)}
shared = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
rotary = {"partial_rotary_factor": 0.25}
KINDS = {"linear_attention": "linear_attn", "full_attention": "self_attn"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, states = Sizes.read(config), delta_sizes(config)
    inner, shared = read_positive(config, "moe_intermediate_size"), "shared_expert_intermediate_size"
    sparse = sparse_layers(config, sizes.layers) if config["num_experts"] else set()

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        return MixtureOfExperts(
            sizes.hidden,
            inner,
            Router(sizes.hidden, top_k_rule(config, "num_experts")),
            shared=read_positive(config, shared),
            shared_name="shared_expert",
            shared_gate="shared_expert_gate",
        )

    projection = by_kind if read(bool, config, "split_projections", False) else by_key_head
    return stack(config, max_positions, sizes, lambda index: GatedDeltaNet(index, states, projection(states)), mlp)


def by_key_head(sizes: DeltaSizes) -> Linear:
    """Checkpoints have two matrices, and in each for every key head the rows of all that goes with it."""
    each = sizes.heads // sizes.key_heads
    counts = {"q": sizes.key_dim, "k": sizes.key_dim, "v": each * sizes.value_dim, "z": each * sizes.value_dim}
    return _projection(sizes, {**_of_key_heads(sizes, "in_proj_qkvz", counts), **_small(sizes)})


def by_kind(sizes: DeltaSizes) -> Linear:
    """GGUF files have queries, keys and values one behind the other, the gate by itself, and the rest as above."""
    parts = sizes.parts
    stored = stacked("in_proj_qkv", {part: parts[part] for part in "qkv"}) | stacked("in_proj_z", {"z": parts["z"]})
    return _projection(sizes, {**stored, **_small(sizes)})


def _small(sizes: DeltaSizes) -> dict[str, Stored]:
    each = sizes.heads // sizes.key_heads
    return _of_key_heads(sizes, "in_proj_ba", {"b": each, "a": each})


def _of_key_heads(sizes: DeltaSizes, module: str, within: Mapping[str, int]) -> dict[str, Stored]:
    """within: rows of each part that go with one key head."""
    stored: dict[str, Stored] = {}
    begin, size = 0, sum(within.values())
    for part, count in within.items():
        firsts = range(begin, size * sizes.key_heads, size)
        stored[part] = Stored(module, size * sizes.key_heads, tuple((first, first + count) for first in firsts))
        begin += count
    return stored


def _projection(sizes: DeltaSizes, stored: dict[str, Stored]) -> Linear:
    return Linear(
        sizes.hidden, sum(sizes.parts.values()), bias=False, parts=sizes.parts, role="rows", heads=sizes.heads_of_parts,
        stored=stored,
    )  # fmt: skip


def stack(
    config: Mapping[str, Any],
    max_positions: int,
    sizes: Sizes,
    linear: Any,
    mlp: Any,
) -> DecoderStack:
    """linear, mlp: what make these layers of a number."""
    interval = read_positive(config, "full_attention_interval", 4)
    kinds = ["linear_attn" if (index + 1) % interval else "self_attn" for index in range(sizes.layers)]
    if config["layer_types"] is not None:
        kinds = kinds_of_layers(config, "layer_types", KINDS, sizes.layers)
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "attention_bias")

    def norm(size: int) -> RMSNorm:
        return RMSNorm(size, sizes.eps, plus_one=True)

    def layer(index: int) -> HybridLayer:
        if kinds[index] == "self_attn":
            norms = QKNorm(norm(sizes.head_dim), norm(sizes.head_dim))
            mixer = GatedAttention(index, *sizes.attention, cos_sin, qk_norm=norms, bias=bias)
        else:
            mixer = linear(index)
        named = (("input_layernorm", norm(sizes.hidden)), ("post_attention_layernorm", norm(sizes.hidden)))
        return HybridLayer((kinds[index], mixer), ("mlp", mlp(index)), named)

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        norm=norm(sizes.hidden),
        naming=Naming(unused=r"^mtp\."),
    )
