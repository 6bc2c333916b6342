"""Every key of config.json that means something to transformers is honoured, known to be harmless, or refused."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from quire.config.engine import EngineConfig
from quire.config.families import families
from quire.config.hf_config import ELSEWHERE, HARMLESS, HFConfig, hf_config
from quire.config.hf_config import sees_both_ways as hf_config_sees_both_ways
from quire.config.model_info import read_model_info
from quire.config.resolve import resolve
from quire.config.rope import ROPE_KEYS
from quire.foundation.errors import ConfigError
from quire.layers.rotary import rotary_table
from quire.models.hybrid.reading import step_limit
from tests.models import checkpoints, sparse_checkpoints
from tests.models.cases import CASES, TWINS
from tests.models.paged import PagedRows
from tests.pooling.encoders import CASES as ENCODERS
from tests.pooling.encoders import TURNED as ENCODERS_TURNED

FAMILIES = sorted(families())
CONFIGS = {
    "lfm2_moe": "Lfm2Moe", "minimax": "MiniMax",
    "qwen3_5_moe": "Qwen3_5MoeText",
}  # fmt: skip
CONFIGS |= {
    family: sparse_checkpoints.CASES[cases[0]][0]
    for family, cases in sparse_checkpoints.FAMILIES.items()
    if family not in sparse_checkpoints.TWINS
}
CONFIGS |= {name: made for name, (made, _) in ENCODERS.items() if name in FAMILIES and name not in ENCODERS_TURNED}
CONFIGS |= {name: made for name, (made, _) in CASES.items() if name in FAMILIES and name not in TWINS}


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
        *declared.aliases,
        *({"rope_local_base_freq"} if "sliding_attention" in declared.rotary else ()),
        *(ROPE_KEYS if "rope_parameters" in declared.defaults else ()),
    }


# What transformers' code has of its own making, and what its configs never hold.
_VISION = {
    "depth", "image_token_id", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size",
    "spatial_merge_size", "temporal_patch_size", "text_config", "video_token_id", "vision_config",
    "vision_start_token_id",
}  # fmt: skip
UNSAID = {
    "qwen3_5": _VISION,
    "qwen3_5_moe": _VISION,
    "gemma3": {"_sliding_window_pattern", "text_config"},
    "falcon": {"rotary", "head_dim"},
    "llama4": {"text_config"},
    "gpt_neox": {"head_dim"},
    "modernbert": {"head_dim", "sliding_window"},
    "jina_embeddings_v3": {"head_dim"},
    "gpt_bigcode": {"num_key_value_heads"},
    "nemotron_h": {
        "expand",
        "time_step_limit",
        "layer_types",
        "num_hidden_layers",
        "attention_bias",
        "get_text_config",
    },
    "bamba": {"layers_block_type", "layer_types"},
    "falcon_h1": {"layers_block_type", "layer_types", "get_text_config"},
    "granitemoehybrid": {"layers_block_type", "rope_type"},
    "mamba2": {"layer_types"},
    "mamba": {"layer_types"},
    "jamba": {"layer_types", "layers_block_type", "layers_num_experts"},
    "falcon_mamba": {"layer_types"},
    "solar_open": {"intermediate_size"},
    "minicpm3": {"logits_scaling"},
    "zamba2": {
        "attention_head_dim",
        "attention_hidden_size",
        "expand",
        "get_text_config",
        "head_dim",
        "hybrid_layer_ids",
        "kv_channels",
        "layer_types",
        "mamba_headdim",
        "n_groups",
        "num_query_groups",
        "rope_type",
        "use_conv_bias",
        "use_mem_eff_path",
    },
    "deberta_v2": {"conv_act", "conv_groups"},
    "gemma3n": {"get_text_config", "gradient_clipping"},
}


def theirs_of(family: str, key: str) -> str:
    """What transformers' config class has a key under."""
    aliases = families()[family].aliases
    fields = config_class(family).__dataclass_fields__
    return next((alias for alias, name in aliases.items() if name == key and alias in fields), key)


def test_all_families_are_compared() -> None:
    assert set(FAMILIES) == {*CONFIGS, *TWINS, *sparse_checkpoints.TWINS, *ENCODERS_TURNED}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_missing_key_is_what_transformers_takes_for_it(family: str) -> None:
    theirs, declared = config_class(family)(), families()[family]
    for key, default in declared.defaults.items():
        # Without a field, the modelling code reads the key if it is there.
        field = theirs.__dataclass_fields__.get(theirs_of(family, key))
        if (family, key) == ("bloom", "max_position_embeddings"):  # it has no longest request
            assert field is None
            continue
        assert default == (None if field is None else field.default), key
    for key, allowed in declared.fixed.items():
        assert theirs.to_dict().get(key) in allowed, key


@pytest.mark.parametrize("family", CONFIGS)
def test_a_saved_config_without_one_of_its_keys(family: str) -> None:
    """Each key in turn: what we read is what transformers reads of the same file."""
    _, config = {**ENCODERS, **CASES}.get(family, ("", {}))
    usual = {key: value for key, value in checkpoints.TINY.items() if theirs_of(family, key) not in config}
    wanted = {**usual, "layer_norm_eps": 1e-5, "rms_norm_eps": 1e-4, **config}
    made = config_class(family)(**{key: value for key, value in wanted.items() if value is not ...})
    saved = {**made.to_dict(), **checkpoints.TOKENS, "architectures": [families()[family].architectures[0]]}
    seen = 0
    for gone in ["none of them", *families()[family].defaults]:
        left_out = (gone, theirs_of(family, gone), "layer_types", "no_rope_layers")
        file = {key: value for key, value in saved.items() if key not in left_out}
        try:
            theirs = config_class(family).from_dict(dict(file))
        except (StrictDataclassError, ValueError, TypeError, IndexError):
            continue  # what is left does not go together
        seen += 1
        ours = hf_config(file, {}).values
        for key in families()[family].defaults:
            if key == "rope_parameters":
                same_rotary(ours[key], theirs.rope_parameters)
            elif key == "time_step_limit":
                assert step_limit(ours) == step_limit({key: theirs.time_step_limit})
            elif key == "sliding_window" and not ours.get("use_sliding_window", True):
                assert not theirs.sliding_window or family == "smollm3"
            elif key in ("head_dim", "qk_head_dim") and "kv_lora_rank" in ours:
                continue  # nobody reads what a file says of them
            elif ours[key] not in (None, "auto") and (key, ours[key]) != ("moe_layer_end_index", -1):  # they follow
                told = getattr(theirs, theirs_of(family, key), families()[family].defaults[key])
                if key == "attn_config":
                    told = {name: getattr(told, name, ANY) for name in ours[key] or ()} or ours[key]
                if isinstance(told, list) and not isinstance(ours[key], list):  # one for all layers
                    told = told[0] if len({*told}) == 1 else told
                assert ours[key] == told, (gone, key)
    assert seen > 5


def same_rotary(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    if "full_attention" in ours:
        for kind in ours:
            same_rotary(ours[kind], theirs[kind])
        return
    if theirs["rope_theta"] is None:
        assert ours["rope_type"] == "none"
        return
    assert ours["rope_type"] == theirs.get("rope_type", theirs.get("type"))
    assert ours["rope_theta"] == theirs["rope_theta"]
    for key in ("partial_rotary_factor", "factor", "original_max_position_embeddings", "beta_fast"):
        assert ours.get(key) == theirs.get(key, ours.get(key)), key


@pytest.mark.parametrize("family", CONFIGS)
def test_no_key_that_transformers_knows_is_unknown(family: str) -> None:
    """Those of the family's config class, and those that its modelling code looks at."""
    made = config_class(family)
    code = inspect.getsource(importlib.import_module(made.__module__.replace("configuration_", "modeling_")))
    if made.__name__ == "Gemma3TextConfig":  # the text alone
        code = code[: code.index("class Gemma3MultiModalProjector")]
    if made.__name__ == "Gemma3nTextConfig":
        text, tower, turned, rest = (
            code.index(f"class Gemma3n{name}")
            for name in ("TextScaledWordEmbedding", "AudioEncoder(", "RotaryEmbedding", "MultimodalEmbedder")
        )
        code = code[text:tower] + code[turned:rest]
    if made.__name__ == "Llama4TextConfig":
        code = code[: code.index("class Llama4CausalLMOutputWithPast")]
    looked_at = set(re.findall(r"\bconfig\.([a-z]\w*)\b", code))
    looked_at |= set(re.findall(r"getattr\(\s*(?:self\.)?config,\s*\"(\w+)\"", code))
    assert len(looked_at) > 10
    fields = set(made().to_dict())
    renamed = getattr(made, "attribute_map", {}).keys()  # that transformers has other names for
    assert sorted((looked_at | fields) - renamed - known(family) - UNSAID.get(family, set())) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_layers_are_bound_to_is_refused_by_name(family: str) -> None:
    for key, allowed in families()[family].fixed.items():
        for value in allowed:
            read(family, **{key: value})
        wrong: Any = (not allowed[0]) if isinstance(allowed[0], bool) else "other"
        if key in ("is_causal", "use_bidirectional_attention"):  # of those that make vectors
            assert hf_config_sees_both_ways(read(family, **{key: wrong}))
        elif wrong not in allowed:
            message = refusal(family, **{key: wrong})
            assert f"{key}={wrong!r}" in message
            assert "not supported" in message
            assert "made for ;" not in message


@pytest.mark.parametrize("family", FAMILIES)
def test_maths_of_other_families_is_refused_by_name(family: str) -> None:
    for key in sorted(ELSEWHERE - known(family)):
        assert f"{key}=" in refusal(family, **{key: {"a": 2} if key.endswith("config") else 30.0})
        for neutral in (None, False, 0, 1, 1.0, [], {}):
            assert key not in read(family, **{key: neutral}).unknown


def test_a_refused_key_can_be_switched_off() -> None:
    assert 'hf_overrides={"attn_logit_softcapping": null}' in refusal("llama", attn_logit_softcapping=50.0)
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
    """Which is honoured where vectors are made (`tests/pooling/test_heads.py`), and refused where text is."""
    both = checkpoints.make(family, is_causal=False)
    one = checkpoints.make(family)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert (both(ids).logits - one(ids).logits).abs().max() > 0.1
    folder = checkpoints.save(both, tmp_path)
    assert read_model_info(folder, {}).sees_both_ways
    with pytest.raises(ConfigError, match=r"is_causal.* is not supported for generating"):
        resolve(EngineConfig.from_flat(model=str(folder), device="cpu"))
    assert not read_model_info(folder, {"is_causal": None}).sees_both_ways


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


LINEAR = {"rope_type": "linear", "factor": 8.0}
OLDER: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": LINEAR}),
    ("gemma3", {"rope_theta": 5e5, "sliding_window_pattern": 3}),
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0,
                                                   "original_max_position_embeddings": 512}}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 5000}),
    ("phi", {"rope_theta": 300.0, "partial_rotary_factor": 0.4}),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "config"), OLDER)
def test_older_rotary_settings_are_read_as_transformers_reads_them(family: str, config: dict[str, Any]) -> None:
    theirs = config_class(family).from_dict(dict(config)).rope_parameters
    same_rotary(read(family, **config).values["rope_parameters"], theirs)


def test_settings_by_layer_can_be_overridden() -> None:
    config = {"rope_theta": 1e6, "rope_local_base_freq": 500.0}
    rope = read("gemma3", {"rope_theta": 2e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, **config).values
    full, sliding = (rope["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    assert (full["rope_theta"], full["factor"], sliding["rope_theta"]) == (2e6, 2.0, 500.0)
    assert "must be given for full_attention and sliding_attention" in refusal("gemma3", rope_parameters={"factor": 2})
    differs = {"full_attention": {"rope_theta": 2.0}, "sliding_attention": {"rope_theta": 3.0}}
    assert "differs by the kind of layer" in refusal("cohere2", rope_parameters=differs)


def test_longropes_first_name() -> None:
    lists = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0]}
    rope = read("phi3", rope_scaling={"type": "su", **lists}, max_position_embeddings=8192).values["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("longrope", 2.0, 4096)
    assert "short_factor must be a list of numbers > 0" in refusal("phi3", rope_scaling={"type": "su"})


def test_two_names_of_one_key_must_agree() -> None:
    assert read("gpt2", n_embd=64, hidden_size=64).values["hidden_size"] == 64
    assert "hidden_size=32 contradicts hidden_size=64" in refusal("gpt2", n_embd=64, hidden_size=32)


def test_attention_that_chooses_its_tokens_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'DeepseekV32ForCausalLM' is not supported: an indexer chooses"):
        hf_config({"architectures": ["DeepseekV32ForCausalLM"]}, {})


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_deberta_of_the_first_version_is_refused_by_name(head: str) -> None:
    with pytest.raises(ConfigError, match=rf"'Deberta{head}' is not supported: it is DeBERTa of the first version"):
        hf_config({"architectures": [f"Deberta{head}"]}, {})


@pytest.mark.parametrize("name", ["XLMRobertaModel", "XLMRobertaLoRA"])
def test_adapters_by_task_among_the_weights_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' is not supported: it is Jina Embeddings v3 as it was first"):
        hf_config({"architectures": [name], "lora_adaptations": ["retrieval.query"]}, {})


@pytest.mark.parametrize(("length", "list_of"), [(32, "short_factor"), (33, "long_factor")])
def test_the_longest_request_says_which_of_longropes_lists(length: int, list_of: str) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 3.0], "long_factor": [5.0, 7.0],
            "original_max_position_embeddings": 32, "factor": 4.0, "partial_rotary_factor": 1.0}  # fmt: skip
    table = rotary_table({"rope_parameters": rope}, 4, length)
    scale = (1 + math.log(4) / math.log(32)) ** 0.5
    angles = 9.0 / torch.tensor(rope[list_of]) * torch.tensor([1.0, 0.01])
    torch.testing.assert_close(table[9], torch.cat([angles.cos(), angles.sin()]) * scale)
    with pytest.raises(ConfigError, match=f"the rotary {list_of} must have 4 numbers, got 2"):
        rotary_table({"rope_parameters": rope}, 8, length)


def test_longrope_beyond_the_trained_length_is_transformers(tmp_path: Path) -> None:
    config = {"original_max_position_embeddings": 24, "rope_parameters": CASES["phi3-longrope"][1]["rope_parameters"]}
    reference = checkpoints.make("Phi3", **config)
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = reference(ids[None]).logits[0]
    ours = PagedRows(checkpoints.load(checkpoints.save(reference, tmp_path))).step([1], [ids.tolist()])[0]
    assert (ours - theirs).abs().max() <= 1e-4


def test_dual_chunk_attention_is_for_families_that_know_it() -> None:
    assert "gemma's layers do not know it" in refusal("gemma", dual_chunk_attention_config={"chunk_size": 64})
