"""Gemma 3n in GGUF files: several residual streams, and vectors of each token's own for every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.config.gguf.family import GgufFamily
from quire.config.gguf.metadata import Metadata
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufTensor
from quire.foundation.json_file import shown


def _shape(tensors: Mapping[str, GgufTensor], name: str) -> tuple[int, ...]:
    """Of a matrix. Raises ConfigError if there is none."""
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ConfigError(f"the GGUF file has no matrix {name}", "model")
    return tensor.shape


def _shut(metadata: Metadata, layers: int) -> list[float]:
    """The share of each layer's gates that are shut: files say how many standard deviations above the mean they open.

    Raises ConfigError for another count of layers, or for what is no number.
    """
    told = metadata.by_layer("activation_sparsity_scale")
    if told is None or len(told) != layers or not all(isinstance(one, float) and one < math.inf for one in told):
        given = shown(metadata.get("activation_sparsity_scale"))
        raise ConfigError(f"activation_sparsity_scale must be {layers} numbers, one a layer, got {given}", "model")
    return [round((1 + math.erf(one / math.sqrt(2))) / 2, 6) for one in told]


def _streams(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Raises ConfigError for sizes that cannot be."""
    layers = config["num_hidden_layers"]
    inner = metadata.by_layer("feed_forward_length") or metadata.number("feed_forward_length")
    borrowing = metadata.get("attention.shared_kv_layers")
    if not isinstance(borrowing, int | float) or borrowing != int(borrowing):
        raise ConfigError(f"attention.shared_kv_layers must count layers, got {shown(borrowing)}", "model")
    config |= {
        "intermediate_size": inner, "num_kv_shared_layers": int(borrowing),
        "altup_num_inputs": metadata.number("altup.num_inputs"), "altup_active_idx": metadata.get("altup.active_idx"),
        "hidden_size_per_layer_input": metadata.number("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _shape(tensors, "per_layer_token_embd.weight")[0],
        "laurel_rank": _shape(tensors, "blk.0.laurel_l.weight")[0],
        "activation_sparsity_pattern": _shut(metadata, layers),
    }  # fmt: skip


STREAMS: dict[str, GgufFamily] = {
    "gemma3n": GgufFamily(
        "Gemma3nForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm", "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
            "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale", "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm",
            "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
            "per_layer_model_proj.weight": "per_layer_model_projection.weight",
            "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
            "altup_proj.weight": "altup_projections.{}.weight",
            "altup_unembd_proj.weight": "altup_unembed_projections.{}.weight",
        },
        keys={"final_logit_softcapping": "final_logit_softcapping"}, windows=True, sized=True,
        idle=("feed_forward_length",), read=_streams,
    ),
}  # fmt: skip
