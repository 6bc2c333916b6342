"""Every key of config.json that means something to transformers is honoured, known to be harmless, or refused."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.config.families import families
from quire.config.hf_config import ELSEWHERE, HARMLESS, HFConfig, hf_config
from quire.config.model_info import read_model_info
from quire.config.rope import ROPE_KEYS
from quire.foundation.errors import ConfigError
from tests.models import checkpoints

FAMILIES = sorted(families())
CONFIGS = {
    "bert": "Bert", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "roberta": "Roberta",
    "xlm_roberta": "XLMRoberta",
}  # fmt: skip


def config_class(family: str) -> type[transformers.PreTrainedConfig]:
    found: type[transformers.PreTrainedConfig] = getattr(transformers, f"{CONFIGS[family]}Config")
    return found


def read(family: str, overrides: dict[str, Any] | None = None, **config: Any) -> HFConfig:
    return hf_config({"architectures": [families()[family].architectures[0]], **config}, overrides or {})


def refusal(family: str, **config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(family, **config)
    return str(caught.value)


def known(family: str) -> set[str]:
    declared = families()[family]
    return {
        *HARMLESS,
        *declared.defaults,
        *declared.fixed,
        *(ROPE_KEYS if "rope_parameters" in declared.defaults else ()),
    }


def test_all_families_are_compared() -> None:
    assert set(FAMILIES) == set(CONFIGS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_is_what_transformers_takes_for_it(family: str) -> None:
    theirs, declared = config_class(family)(), families()[family]
    for key, default in declared.defaults.items():
        field = theirs.__dataclass_fields__.get(key)  # without one, the modelling code reads it if it is there
        assert default == (None if field is None else field.default), key
    for key, allowed in declared.fixed.items():
        assert getattr(theirs, key, None) in allowed, key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_config_without_one_of_its_keys(family: str) -> None:
    """Each key in turn: what we read is what transformers reads of the same file."""
    sizes = {**checkpoints.TINY, "hidden_size": 64}
    made = config_class(family)(**sizes, layer_norm_eps=1e-5, rms_norm_eps=1e-4)
    saved = {**made.to_dict(), "architectures": [families()[family].architectures[0]]}
    for gone in ["none of them", *families()[family].defaults]:
        file = {key: value for key, value in saved.items() if key not in (gone, "layer_types")}
        theirs = config_class(family).from_dict(dict(file))
        ours = hf_config(file, {}).values
        for key in families()[family].defaults:
            if key == "rope_parameters":
                assert ours[key]["rope_theta"] == theirs.rope_parameters["rope_theta"]
            elif key == "sliding_window" and not ours.get("use_sliding_window", True):
                assert theirs.sliding_window is None
            elif ours[key] is not None:  # null: follows from others
                assert ours[key] == getattr(theirs, key), (gone, key)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_transformers_knows_is_unknown(family: str) -> None:
    """Those of the family's config class, and those that its modelling code looks at."""
    name = config_class(family).__module__.replace("configuration_", "modeling_")
    code = inspect.getsource(importlib.import_module(name))
    looked_at = set(re.findall(r"\bconfig\.([a-z]\w*)\b", code))
    looked_at |= set(re.findall(r"getattr\(\s*(?:self\.)?config,\s*\"(\w+)\"", code))
    assert len(looked_at) > 10
    fields = set(config_class(family)().to_dict())
    assert sorted((looked_at | fields) - known(family)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_layers_are_bound_to_is_refused_by_name(family: str) -> None:
    for key, allowed in families()[family].fixed.items():
        for value in allowed:
            read(family, **{key: value})
        wrong: Any = (not allowed[0]) if isinstance(allowed[0], bool) else "other"
        if wrong not in allowed:
            message = refusal(family, **{key: wrong})
            assert f"{key}={wrong!r}" in message
            assert "not supported" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_maths_of_other_families_is_refused_by_name(family: str) -> None:
    for key in sorted(ELSEWHERE - known(family)):
        assert f"{key}=" in refusal(family, **{key: {"a": 2} if key.endswith("config") else 30.0})
        for neutral in (None, False, 0, 1, 1.0, [], {}):
            assert key not in read(family, **{key: neutral}).unknown


def test_a_refused_key_can_be_switched_off() -> None:
    assert 'hf_overrides={"is_causal": null}' in refusal("qwen3", is_causal=False)
    read("qwen3", {"is_causal": None}, is_causal=False)
    read("llama", {"attn_logit_softcapping": None}, attn_logit_softcapping=50.0)


def test_what_means_nothing_to_anybody_is_told_once(tmp_path: Path) -> None:
    assert read("llama", unsloth_version="2025.1", use_mrope=False).unknown == ("unsloth_version", "use_mrope")
    nested = {"rope_type": "default", "mrope_section": [1, 2]}
    assert read("llama", rope_parameters=nested).unknown == ("rope_parameters.mrope_section",)
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path)
    assert read_model_info(folder, {}).unknown_keys == ()
    assert read_model_info(folder, {"odd": 1}).unknown_keys == ("odd",)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_attention_both_ways_in_a_decoder_changes_what_it_says(family: str, tmp_path: Path) -> None:
    """transformers honours `is_causal`; here it is refused, of embedders too."""
    both = checkpoints.make(family, is_causal=False)
    one = checkpoints.make(family)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert (both(ids).logits - one(ids).logits).abs().max() > 0.1
    folder = checkpoints.save(both, tmp_path)
    for architecture in (f"{family}ForCausalLM", f"{family}Model"):
        with pytest.raises(ConfigError, match="is_causal=False is not supported"):
            read_model_info(folder, {"architectures": [architecture]})


EOS: list[tuple[dict[str, Any], dict[str, Any] | None, list[int]]] = [
    ({"eos_token_id": 5}, None, [5]),
    ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, [7, 5, 6]),
    ({"eos_token_id": None}, None, []),
    ({}, None, [2]),  # of Llama
    ({}, {"eos_token_id": 9}, [9]),
    ({}, {"temperature": 0.5}, [2]),
]


@pytest.mark.parametrize(("config", "generation", "expected"), EOS)
def test_end_tokens(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: list[int], tmp_path: Path
) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_model_info(tmp_path, {}).eos_token_ids == expected
