"""Choosing and building a model: what is refused, and in which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.families import families, supported
from quire.config.hf_config import hf_config
from quire.config.model_info import ModelInfo
from quire.foundation.errors import ConfigError
from quire.models import catalog
from quire.models.base import DecoderStack
from tests.models.checkpoints import CPU, TINY


def build(architecture: str = "LlamaForCausalLM", max_positions: int = 64, **config: Any) -> DecoderStack:
    info = ModelInfo(
        path="",
        architecture=architecture,
        hf_config=hf_config({"architectures": [architecture], **TINY, **config}, {}).values,
        vocab_size=TINY["vocab_size"],
        max_position=64,
        eos_token_ids=[],
        bos_token_id=None,
        dtype="float32",
    )
    return catalog.build(info, torch.float32, CPU, max_positions)


def refusal(architecture: str = "LlamaForCausalLM", **config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(architecture, **config)
    return str(caught.value)


def test_every_family_file_is_found_and_has_a_builder() -> None:
    import importlib

    assert set(supported()) >= {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
    for architecture, file in supported().items():
        family = importlib.import_module(families()[file].module)
        assert architecture in family.architectures
        assert callable(family.build)


def test_looking_for_one_model_imports_no_other() -> None:
    code = "import sys; from quire.config.families import supported; supported(); print([m for m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert "quire.config.families" in done.stdout
    assert "quire.models" not in done.stdout


def test_unknown_architecture_names_the_nearest() -> None:
    message = refusal("Qwen4ForCausalLM")
    assert "'Qwen4ForCausalLM'" in message
    assert "nearest is Qwen3ForCausalLM" in message or "nearest is Qwen2ForCausalLM" in message
    assert f"docs/models.md lists the {len(supported())} that are" in message
    assert "nearest" not in refusal("XYZ")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_attention_heads": None}, ["num_attention_heads", "null"]),
        ({"num_attention_heads": "16"}, ["num_attention_heads", "an integer", "'16'"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", ">= 1", "0"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "3"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "finite", "nan"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps", ">= 0"]),
        ({"vocab_size": 2**40}, ["vocab_size", "<= 2147483647"]),
        ({"vocab_size": 10**30}, ["vocab_size", "64 bits"]),
        ({"hidden_size": 2**31 - 4, "intermediate_size": 2**31 - 1, "head_dim": 8}, ["cannot be allocated"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "a finite number", "'small'"]),
        ({"attention_bias": 1}, ["attention_bias", "true or false", "1"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "object"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, ["rope_type", "'spiral'", "llama3", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "> 0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"partial_rotary_factor": 0.01}, ["partial_rotary_factor=0.01", "whole heads"]),
        ({"head_dim": 15}, ["rotary", "[2, 15]"]),
    ],
)
def test_configs_that_cannot_be(config: dict[str, Any], words: list[str]) -> None:
    message = refusal(**config)
    assert all(word in message for word in words), message


def windows(model: DecoderStack) -> list[int]:
    """Of each layer; 0: none."""
    groups = model.kv_groups(16)
    return [groups[group].window for group in model.layer_groups]


KINDS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}, [0, 8, 8]),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": KINDS}, [0, 8, 0]),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": KINDS, "max_window_layers": 0}, [0, 8, 0]),
        ("MistralForCausalLM", {"layer_types": KINDS}, [0, 8, 0]),
        ("MinistralForCausalLM", {"layer_types": KINDS[::-1]}, [0, 8, 0]),
        ("MinistralForCausalLM", {}, [8, 8, 8]),
    ],
)
def test_windows_of_some_layers_are_a_group_of_their_own(
    architecture: str, config: dict[str, Any], expected: list[int]
) -> None:
    model = build(architecture, sliding_window=8, **config)
    assert windows(model) == expected
    groups = model.kv_groups(16)
    assert {(g.kind, g.window, g.num_layers) for g in groups} == {
        ("window" if window else "full", window, expected.count(window)) for window in expected
    }
    assert [layer.self_attn.group for layer in model.layers] == model.layer_groups


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 8}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, None),
        ({"use_sliding_window": True, "sliding_window": 8}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3}, None),
        # As wide as the context (64): of no effect, whichever layers have it.
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, None),
        ({"use_sliding_window": True, "sliding_window": 63, "max_window_layers": 0}, 63),
    ],
)
def test_windows_of_all_layers_or_none(config: dict[str, Any], window: int | None) -> None:
    assert windows(build("Qwen2ForCausalLM", **config)) == [window or 0] * 3


SLIDING, FULL = ["sliding_attention"] * 3, ["full_attention"] * 3


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, 4096),  # transformers' default for a missing key
        ({"sliding_window": None}, None),
        ({"sliding_window": 8}, 8),
        ({"sliding_window": 8, "layer_types": None}, 8),
        ({"sliding_window": 8, "layer_types": SLIDING}, 8),
        ({"sliding_window": 8, "layer_types": FULL}, None),
        ({"sliding_window": None, "layer_types": FULL}, None),
        ({"sliding_window": 8192, "layer_types": [*SLIDING[:2], *FULL[:1]]}, None),
    ],
)
def test_windows_of_mistral(config: dict[str, Any], window: int | None) -> None:
    assert windows(build("MistralForCausalLM", 8192, **config)) == [window or 0] * 3


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("MistralForCausalLM", {"sliding_window": None, "layer_types": SLIDING}, "there is no sliding_window"),
        ("Qwen3ForCausalLM", {"layer_types": SLIDING}, "there is no sliding_window"),
        ("Qwen2ForCausalLM", {"layer_types": FULL[:2]}, "an entry for each of num_hidden_layers=3"),
        ("Qwen2ForCausalLM", {"layer_types": "full_attention"}, "must be a list"),
        ("Qwen2ForCausalLM", {"layer_types": [*FULL[:2], "linear_attention"]}, "got 'linear_attention'"),
        ("LlamaForCausalLM", {"sliding_window": 8}, "sliding_window=8 is not supported"),
        ("LlamaForCausalLM", {"layer_types": SLIDING}, "layer_types="),
    ],
)
def test_windows_that_cannot_be(architecture: str, config: dict[str, Any], words: str) -> None:
    assert words in refusal(architecture, **config)


def test_facts_for_the_worker() -> None:
    model = build(head_dim=16)
    (spec,) = model.kv_groups(block_size=32)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size) == (3, 2, 16, 32)
    assert spec.bytes_per_block == 2 * 32 * 3 * 2 * 16 * 4
    assert model.num_heads == 4
    assert model.num_bytes() == 4 * sum(p.numel() for p in model.parameters())


def test_the_default_dtype_is_left_alone() -> None:
    refusal(hidden_act="gelu")
    assert torch.get_default_dtype() == torch.float32
