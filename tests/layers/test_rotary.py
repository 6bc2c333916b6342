"""Rotary tables against transformers', in both spellings of the config, and against the papers' own properties."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.config.hf_config import hf_config
from quire.config.rope import context_length
from quire.foundation.errors import ConfigError
from quire.layers import rotary

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


def rotary_table(config: dict[str, Any], head_dim: int, positions: int) -> torch.Tensor:
    """Through the reader of config.json: of Llama, or of a family of which a part of the head may turn."""
    architecture = "NemotronForCausalLM" if "partial_rotary_factor" in str(config) else "LlamaForCausalLM"
    given = {"architectures": [architecture], "max_position_embeddings": 2048, **config}
    return rotary.rotary_table(hf_config(given, {}).values, head_dim, positions)


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


INSIDE: dict[str, list[Any]] = {
    "rope_parameters": [
        ...,
        None,
        {},
        {"rope_type": "default", "rope_theta": 3000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 2000.0, "original_max_position_embeddings": 128},
    ],
    "rope_scaling": [
        ...,
        None,
        {"type": "linear", "factor": 3.0},
        {**SCALINGS[2], "rope_theta": 700.0},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
    ],
    "rope_theta": [..., 5000.0],
    "original_max_position_embeddings": [..., 32],
}


def files() -> list[dict[str, Any]]:
    """Every file that says some of it, in one form, in both, or twice."""
    choices = itertools.product(*INSIDE.values())
    return [{key: value for key, value in zip(INSIDE, choice, strict=True) if value is not ...} for choice in choices]


def transformers_table(file: dict[str, Any]) -> torch.Tensor:
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": POSITIONS}
    module = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy({**sizes, **file})))
    cos, sin = module(torch.zeros(1), torch.arange(POSITIONS)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=2**-22 * POSITIONS, rtol=0)


def test_whatever_a_file_says_twice_is_resolved_as_transformers_does() -> None:
    """All forms and contradictions: which section counts, and what stands inside it or beside it."""
    cases = files()
    assert len(cases) == 100
    for file in cases:
        ours = rotary_table({"max_position_embeddings": POSITIONS, **file}, HEAD_DIM, POSITIONS)
        assert same(ours, transformers_table(file)), file


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_overrides_win_in_whatever_form_the_file_speaks(form: str) -> None:
    """As if the file had said it, and nothing else of the same."""
    beside = {"rope_theta": 5000.0} if form == "rope_scaling" else {}
    inside = {} if beside else {"rope_theta": 5000.0}
    file = {form: {**SCALINGS[2], **inside}, **beside, "max_position_embeddings": POSITIONS}
    yarn, linear = SCALINGS[3], {"type": "linear", "factor": 2.5}
    for override, meaning in (
        ({"rope_scaling": yarn}, {"rope_theta": 5000.0, "rope_scaling": yarn}),
        ({"rope_parameters": yarn}, {"rope_theta": 5000.0, "rope_scaling": yarn}),
        ({"rope_scaling": linear}, {"rope_theta": 5000.0, "rope_scaling": linear}),
        ({"rope_scaling": None}, {"rope_theta": 5000.0}),
        ({"rope_theta": 77.0}, {"rope_theta": 77.0, "rope_scaling": SCALINGS[2]}),
        ({"rope_theta": 77.0, "rope_scaling": linear}, {"rope_theta": 77.0, "rope_scaling": linear}),
        ({"rope_parameters": {**yarn, "rope_theta": 9.0}}, {"rope_theta": 9.0, "rope_scaling": yarn}),
    ):
        values = hf_config({"architectures": ["LlamaForCausalLM"], **file}, override).values
        assert same(rotary.rotary_table(values, HEAD_DIM, POSITIONS), transformers_table(meaning)), override


def test_the_context_grows_with_the_table() -> None:
    """What lengthens the context and what fills the table is read by one reader."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for file in ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}):
        rope = hf_config({"architectures": ["LlamaForCausalLM"], **file}, {"rope_scaling": yarn}).values[
            "rope_parameters"
        ]
        assert context_length(rope, 64) == 256
        assert (rope["rope_type"], rope["rope_theta"]) == ("yarn", 1e6)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_theta": 0}, "rope_theta must be > 0, got 0"),
        ({"rope_theta": -1.0}, "rope_theta must be > 0, got -1"),
        ({"rope_theta": 1.0, "rope_scaling": SCALINGS[3]}, "rope_theta must be > 1, got 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor must be a finite number, got '4'"),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}}, "alpha=1000.0"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor must be in"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {}}}, "kind of layer"),
    ],
)
def test_settings_that_cannot_be(rope: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rotary_table({"max_position_embeddings": POSITIONS, **rope}, HEAD_DIM, POSITIONS)
    assert words in str(caught.value)
