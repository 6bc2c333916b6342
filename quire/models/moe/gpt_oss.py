"""gpt-oss: sinks in attention, a window in every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.experts import ExpertNames, Gate, MixtureOfExperts, Router, SparseLayer
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.moe.reading import top_k_rule
from quire.models.window import layer_windows

architectures = ("GptOssForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": None,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "swiglu_limit": (7.0, None),
}
rotary = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
aliases = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")

GATE = Gate(alpha=1.702, limit=7.0, shift=1.0)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """Softmax over the chosen alone is the renormalized one over all."""
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = layer_windows(config, sizes.layers, max_positions, pattern=2)
    bias, rule = read(bool, config, "attention_bias"), top_k_rule(config, "num_local_experts", renormalize=True)
    names = ExpertNames(transposed=True, interleaved=True)

    def layer(index: int) -> SparseLayer:
        attention = Attention(
            index, *sizes.attention, cos_sin, window=windows[index], qkv_bias=bias, out_bias=bias, sinks=True
        )
        router = Router(sizes.hidden, rule, bias=True)
        mlp = MixtureOfExperts(sizes.hidden, sizes.intermediate, router, names=names, gate=GATE, bias=True)
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, naming=Naming(parts={"gate": "router"}))
