"""Families of GGUF files in which some layers attend, and others do something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.gguf.family import GgufFamily
from quire.config.gguf.metadata import Metadata
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufTensor

_CONVOLUTIONS = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
    "token_embd_norm.weight": "embedding_norm.weight", "output_norm.weight": "embedding_norm.weight",
}  # fmt: skip
_MIXED = {
    **_CONVOLUTIONS, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1", "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}  # fmt: skip


def _of_layers(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """LFM2: layers without attention have short convolutions."""
    del tensors
    layers, heads = config["num_hidden_layers"], metadata.by_layer("attention.head_count_kv")
    if heads is not None and len(heads) != layers:
        raise ConfigError(f"attention.head_count_kv has {len(heads)} values for block_count={layers}", "model")
    config["layer_types"] = ["full_attention" if count else "conv" for count in heads or [1] * layers]
    config["conv_L_cache"] = metadata.number("shortconv.l_cache")


_LFM2 = GgufFamily(
    "Lfm2ForCausalLM", _CONVOLUTIONS, bias=None, eps="norm_eps", fixed={"block_auto_adjust_ff_dim": False},
    some_attend=True, lifted={"shortconv.conv": (1, 3)}, read=_of_layers,
)  # fmt: skip
HYBRID: dict[str, GgufFamily] = {
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2, architecture="Lfm2MoeForCausalLM", names=_MIXED, fixed={}, neutral={"expert_gating_func": (2,)},
        keys={
            "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "num_dense_layers",
            "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
        },
    ),
}  # fmt: skip
