"""Rotary tables against transformers', in both spellings of the config, and against the papers' own properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.foundation.errors import ConfigError
from quire.layers.rotary import rotary_table

HEAD_DIM = 64
POSITIONS = 512
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    {"rope_type": "dynamic", "factor": 2.0},
]


def reference(theta: float, scaling: dict[str, Any], positions: int = POSITIONS) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    return torch.cat([cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]], dim=1)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_both_spellings_equal_the_reference(scaling: dict[str, Any], theta: float) -> None:
    common = {"max_position_embeddings": POSITIONS}
    new = {**common, "rope_parameters": {"rope_theta": theta, **scaling}}
    kind = {"type": scaling["rope_type"], **{k: v for k, v in scaling.items() if k != "rope_type"}}
    old = {**common, "rope_theta": theta, "rope_scaling": kind}
    expected = reference(theta, scaling)
    for config in (new, old):
        # A frequency's last float32 bit, times the positions.
        assert torch.allclose(rotary_table(config, HEAD_DIM, POSITIONS), expected, atol=2**-23 * POSITIONS, rtol=0)


def test_scalings_differ() -> None:
    """The comparison above would say nothing if all tables were alike."""
    tables = [
        rotary_table({"max_position_embeddings": POSITIONS, "rope_parameters": s}, HEAD_DIM, POSITIONS)
        for s in SCALINGS[:-2]  # the last two say what others say, in other words
    ]
    for i, table in enumerate(tables):
        for other in tables[i + 1 :]:
            assert (table - other).abs().max() > 1e-3


def test_nothing_said_means_the_plain_table_of_base_10000() -> None:
    for config in ({}, {"rope_scaling": None, "rope_theta": None}):
        assert torch.allclose(rotary_table(config, HEAD_DIM, 8), reference(10000.0, {"rope_type": "default"}, 8))


def test_only_a_part_of_the_head_may_turn() -> None:
    table = rotary_table({"partial_rotary_factor": 0.25}, HEAD_DIM, 16)
    assert table.shape == (16, HEAD_DIM // 4)
    assert torch.equal(table, rotary_table({}, HEAD_DIM // 4, 16))


def test_dynamic_scaling_beyond_the_trained_length_is_refused() -> None:
    config = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert torch.equal(rotary_table(config, HEAD_DIM, 64), rotary_table({}, HEAD_DIM, 64))
    with pytest.raises(ConfigError, match=r"max_model_len must be <= 64, got 65"):
        rotary_table(config, HEAD_DIM, 65)
