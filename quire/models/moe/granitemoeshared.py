"""Granite 3 with experts, some of them for every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read_count
from quire.models.base import DecoderStack
from quire.models.moe import granitemoe

architectures = ("GraniteMoeSharedForCausalLM",)
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
    "shared_intermediate_size": 0,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_experts": "num_local_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "shared_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    return granitemoe.build_shared(config, max_positions, read_count(config, "shared_intermediate_size"))
