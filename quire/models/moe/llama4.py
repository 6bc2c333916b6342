"""Llama 4's text: attention within chunks but for every fourth layer, which knows of no positions; one expert a token,
whose input is scaled, and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.attention import Attention, QKNorm
from quire.layers.experts import ExpertNames, MixtureOfExperts, Router, Rule, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import UnitNorm
from quire.layers.rotary import no_rotation, position_scales, rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.window import turning_layers

architectures = ("Llama4ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "num_local_experts": 16,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "router_jitter_noise": 0.0,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "num_experts_per_tok": (1, None),
}
rotary = {"rope_theta": 500000.0}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "intermediate_size_mlp")
NAMING = Naming(parts={"mlp": "feed_forward", "gate": "router"})


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """`router_jitter_noise` is of training alone."""
    sizes = Sizes.read(config)
    cos_sin, still = rotary_table(config, sizes.head_dim, max_positions), no_rotation(max_positions, sizes.head_dim)
    turns = turning_layers({**config, "no_rope_layers": config["no_rope_layers"] or None}, sizes.layers)
    chunks, sparse = _chunks(config, turns, max_positions), _sparse(config, sizes.layers)
    bias, normed = read(bool, config, "attention_bias"), read(bool, config, "use_qk_norm")
    beta = read(float, config, "attn_scale") if _tuned(config) else 0.0
    scales = position_scales(beta, read_positive(config, "floor_scale"), max_positions, first=1)
    rule, names = Rule(read_positive(config, "num_local_experts"), 1, scoring="sigmoid"), ExpertNames(transposed=True)
    dense = read_positive(config, "intermediate_size_mlp")

    def layer(index: int) -> SparseLayer:
        turn = turns[index]
        norms = [UnitNorm(sizes.head_dim, sizes.eps) for _ in "qk"]
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin if turn else still,
            chunk=chunks[index],
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(norms[0], norms[1], on="turned") if normed and turn else None,
            interleaved=True,
            query_scales=None if turn else scales,
        )
        mlp: GatedMLP | MixtureOfExperts = GatedMLP(sizes.hidden, dense)
        if index in sparse:
            mlp = MixtureOfExperts(
                sizes.hidden,
                sizes.intermediate,
                Router(sizes.hidden, rule),
                names=names,
                shared=sizes.intermediate,
                shared_name="shared_expert",
                scales_input=True,
            )
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)


def _chunks(config: Mapping[str, Any], turns: list[bool], max_positions: int) -> list[int | None]:
    """Tokens of a chunk of each layer; None: it sees all, as with chunks of `max_positions` and more."""
    kinds = config["layer_types"]
    if kinds is None:
        kinds = ["chunked_attention" if turn else "full_attention" for turn in turns]
    known = ("full_attention", "chunked_attention")
    if not isinstance(kinds, list) or len(kinds) != len(turns) or any(kind not in known for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types must be a list of {' and '.join(known)} for each of "
            f"num_hidden_layers={len(turns)}, got {shown(kinds)}",
            "layer_types",
        )
    if known[1] not in kinds:
        return [None] * len(turns)
    size = read_positive(config, "attention_chunk_size")
    return [size if kind == known[1] and size < max_positions else None for kind in kinds]


def _sparse(config: Mapping[str, Any], layers: int) -> set[int]:
    """Numbers of the layers that have experts."""
    told = config["moe_layers"]
    if told is None:
        step = read_positive(config, "interleave_moe_layer_step")
        return set(range(step - 1, layers, step))
    if not isinstance(told, list) or not all(type(number) is int and number >= 0 for number in told):
        raise ConfigError(f"config.json: moe_layers must be a list of layers' numbers, got {shown(told)}", "moe_layers")
    return set(told)


def _tuned(config: Mapping[str, Any]) -> bool:
    """Older files have a number for the switch."""
    told = config["attn_temperature_tuning"]
    if not isinstance(told, int):
        raise ConfigError(
            f"config.json: attn_temperature_tuning must be true or false, got {shown(told)}", "attn_temperature_tuning"
        )
    return bool(told)
