"""Granite 4: Granite's numbers, Mamba-2 in most layers, and beside a feed-forward layer experts in larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import HybridLayer
from quire.layers.recurrent.mamba2 import GatedNorm, Mamba2
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Logits, Naming, Sizes
from quire.models.hybrid.reading import kinds_of_layers, mamba2_sizes
from quire.models.moe.reading import SparseStack, top_k_rule

architectures = ("GraniteMoeHybridForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "position_embedding_type": None,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "layer_types": None,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, 1e999),
    "split_projections": None,  # of GGUF files: gate and up are matrices of their own, and all is called as here
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "position_embedding_type": ("rope", "nope", None),
    "is_encoder_decoder": (False, None),
}
shared = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "shared_intermediate_size",
    "mamba_n_heads",
    "mamba_n_groups",
)
KINDS = {"linear_attention": "mamba", "mamba": "mamba", "full_attention": "self_attn", "attention": "self_attn"}
RENAMED = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.gate.weight",
    ".shared_mlp.": ".block_sparse_moe.shared_mlp.",
}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """Softmax over the chosen alone is the renormalized one over all."""
    sizes, states = Sizes.read(config), mamba2_sizes(config)
    turns = config["position_embedding_type"] == "rope"
    cos_sin = (rotary_table(config, sizes.head_dim, max_positions) if turns
               else no_rotation(max_positions, sizes.head_dim))  # fmt: skip
    kinds = ["mamba"] * sizes.layers
    if config["layer_types"] is not None:
        kinds = kinds_of_layers(config, "layer_types", KINDS, sizes.layers)
    bias, shared = read(bool, config, "attention_bias"), read_positive(config, "shared_intermediate_size")
    scale, added = read(float, config, "attention_multiplier"), read(float, config, "residual_multiplier")
    split = read(bool, config, "split_projections", False)
    fused = "" if split else "input_linear"
    rule = top_k_rule(config, "num_local_experts", renormalize=True) if config["num_local_experts"] else None

    def layer(index: int) -> HybridLayer:
        mlp: tuple[str, GatedMLP | MixtureOfExperts] = (
            "shared_mlp",
            GatedMLP(sizes.hidden, shared, fused=fused),
        )
        if rule is not None:
            experts = MixtureOfExperts(
                sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule), shared=shared, shared_name="shared_mlp",
                shared_fused=fused,
            )  # fmt: skip
            mlp = "block_sparse_moe", experts
        mixer: tuple[str, Attention | Mamba2] = "mamba", Mamba2(index, states, GatedNorm(states.inner, sizes.eps))
        if kinds[index] == "self_attn":
            attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, scale=scale)
            mixer = "self_attn", attention
        norms = (RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps))
        named = (("input_layernorm", norms[0]), ("post_attention_layernorm", norms[1]))
        return HybridLayer(mixer, mlp, named, scale=added)

    renamed = {**RENAMED, ".output_linear.": ".down_proj."} if rule and not split else {}
    return SparseStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        logits=Logits.divided(config, "logits_scaling"),
        input_scale=read(float, config, "embedding_multiplier"),
        naming=Naming(parts={} if rule else {"down_proj": "output_linear"}),
        renamed=renamed,
    )
