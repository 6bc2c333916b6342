"""What families with latent attention read of config.json alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.experts import MixtureOfExperts, Router, Rule
from quire.layers.latent import LatentAttention, LatentShape
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import sharpened_scale, table_of
from quire.models.base import Sizes


def latent_shape(config: Mapping[str, Any], sizes: Sizes) -> LatentShape:
    """Raises ConfigError for fewer key heads than query heads: every head makes its own of the latent row."""
    if sizes.kv_heads != sizes.heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={sizes.kv_heads} must be num_attention_heads={sizes.heads}: latent "
            "attention makes a key of every query head",
            "num_key_value_heads",
        )
    if read_positive(config, "qk_rope_head_dim") % 2:
        raise ConfigError(
            f"config.json: qk_rope_head_dim={config['qk_rope_head_dim']} must be even: columns turn in pairs",
            "qk_rope_head_dim",
        )
    return LatentShape(
        heads=sizes.heads,
        nope=read_positive(config, "qk_nope_head_dim"),
        rope=read_positive(config, "qk_rope_head_dim"),
        value=read_positive(config, "v_head_dim", sizes.hidden // sizes.heads),
        rank=read_positive(config, "kv_lora_rank"),
        q_rank=None if config["q_lora_rank"] is None else read_positive(config, "q_lora_rank"),
    )


def latent_attention(
    config: Mapping[str, Any], sizes: Sizes, max_positions: int, *, interleaved: bool, **more: Any
) -> Callable[[int], LatentAttention]:
    """Makes the attention of the layer of a given number. more: see `LatentAttention`."""
    shape, rope = latent_shape(config, sizes), config["rope_parameters"]
    cos_sin = table_of(rope, shape.rope, shape.rope, max_positions)
    scale, bias = sharpened_scale(rope, shape.nope + shape.rope), read(bool, config, "attention_bias")

    def layer(index: int) -> LatentAttention:
        return LatentAttention(
            index, sizes.hidden, shape, cos_sin, scale=scale, bias=bias, interleaved=interleaved, **more
        )

    return layer


def feed_forward(
    config: Mapping[str, Any],
    sizes: Sizes,
    rule: Rule,
    sparse: set[int],
    *,
    correction: str | None = "e_score_correction_bias",
    bias: bool = False,
) -> Callable[[int], GatedMLP | MixtureOfExperts]:
    """Makes what stands behind the attention of the layer of a given number. sparse: the layers that have experts.

    bias: of dense layers and shared experts. correction: see `Router`.
    """
    inner = read_positive(config, "moe_intermediate_size")
    shared = inner * read_count(config, "n_shared_experts")

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate, bias=bias)
        router = Router(sizes.hidden, rule, correction=correction)
        return MixtureOfExperts(sizes.hidden, inner, router, shared=shared, shared_bias=bias)

    return mlp
