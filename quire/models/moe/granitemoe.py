"""Granite 3 with experts: Granite's numbers, and experts that are stored together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Sizes
from quire.models.moe.reading import SparseStack, top_k_rule

architectures = ("GraniteMoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_experts": "num_local_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
RENAMED = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "mlp.gate.weight",
    ".shared_mlp.output_linear.": ".mlp.shared_mlp.down_proj.",
    ".shared_mlp.input_linear.": ".mlp.shared_mlp.input_linear.",
}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    return build_shared(config, max_positions, 0)


def build_shared(config: Mapping[str, Any], max_positions: int, shared: int) -> DecoderStack:
    """shared: the inner size of the experts for every token; 0: there are none.

    Softmax over the chosen alone is the renormalized one over all.
    """
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, rule = read(bool, config, "attention_bias"), top_k_rule(config, "num_local_experts", renormalize=True)
    scale, added = read(float, config, "attention_multiplier"), read(float, config, "residual_multiplier")

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, scale=scale)
        mlp = MixtureOfExperts(
            sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule), shared=shared, shared_name="shared_mlp",
            shared_fused="input_linear",
        )  # fmt: skip
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps, scale=added)

    return SparseStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        logits=Logits.divided(config, "logits_scaling"),
        input_scale=read(float, config, "embedding_multiplier"),
        renamed=RENAMED,
    )
