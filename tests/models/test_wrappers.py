"""Text parts of models that also see, against transformers' whole model on text alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.config.files.wrappers import DECODERS, DEFAULTS, WRAPPERS, decoders_name
from quire.config.hf_config import hf_config
from quire.config.model_info import check_architecture, read_model_info
from quire.foundation.errors import ConfigError
from tests.models import checkpoints
from tests.models.paged import PagedRows

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
VISION |= {"image_size": 8, "num_channels": 3}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
HALF = {**SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "decoder_sparse_step": 1,
}
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LLAMA, MISTRAL = {"model_type": "llama"}, {"model_type": "mistral", "sliding_window": None, "head_dim": 12}
# transformers' class → text config, vision config, more.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 7},
        {"model_type": "siglip_vision_model", **VISION},
        {"mm_tokens_per_image": 4},
    ),
    "Mistral3": (MISTRAL, {"model_type": "pixtral", "head_dim": 16, **VISION}, {"tie_word_embeddings": False}),
    "Llava": (LLAMA, {"model_type": "clip_vision_model", **VISION}, {}),
    "LlavaOnevision": (
        {"model_type": "qwen2"}, {"model_type": "siglip_vision_model", **VISION}, {"tie_word_embeddings": True},
    ),
    "InternVL": ({"model_type": "qwen3", "head_dim": 16}, {**VISION, "patch_size": [4, 4], "image_size": [8, 8]}, {}),
    "Idefics3": (LLAMA, VISION, {}),
    "SmolVLM": (LLAMA, VISION, {"tie_word_embeddings": True}),
    "Qwen2VL": ({"rope_parameters": SECTIONS}, {**QWEN, "embed_dim": 32, "hidden_size": 48}, {}),
    "Qwen2_5_VL": ({"rope_parameters": {**SECTIONS, "rope_type": "mrope"}}, QWEN, {}),
    "Qwen3VL": (
        {"head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, {"tie_word_embeddings": True},
    ),
    "Qwen3VLMoe": (
        {**MOE, "rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}},
        {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, {},
    ),
    "Qwen3_5": (
        {**DELTA, "rope_parameters": HALF}, {**QWEN, "num_position_embeddings": 16}, {"tie_word_embeddings": True},
    ),
    "Qwen3_5Moe": (
        {**DELTA, **MOE, "shared_expert_intermediate_size": 32, "rope_parameters": HALF},
        {**QWEN, "num_position_embeddings": 16}, {},
    ),
    "Glm4v": (
        {"rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}, "head_dim": ...},
        QWEN, {},
    ),
    "Llama4": (
        {
            "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 56, "attention_chunk_size": 12,
            "no_rope_layers": [1, 0, 1], "interleave_moe_layer_step": 2,
        },
        {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}, {},
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    """A tiny wrapper of random numbers, saved."""
    text, vision, more = CASES[name]
    wanted = {**checkpoints.TINY, **checkpoints.TOKENS, **text}
    config = getattr(transformers, f"{name}Config")(
        text_config={key: value for key, value in wanted.items() if value is not ...},
        vision_config=vision, **{"image_token_id": 90, "image_token_index": 90, **more},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    added = 1 if name == "Gemma3" else 0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and key.endswith("weight"):
                parameter.uniform_(0.5, 1.5).sub_(added)
            else:
                parameter.normal_(0, 0.15)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits


def largest(folder: Path, expected: torch.Tensor, tokens: list[int]) -> float:
    rows = PagedRows(checkpoints.load(folder), max_rows=1)
    parts = [rows.step([1], [tokens[:20]])[0], *(rows.step([1], [[token]])[0] for token in tokens[20:])]
    return (torch.cat(parts) - expected).abs().max().item()


TOKENS = torch.randint(0, 90, (30,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_the_text_part_is_transformers(name: str, tmp_path: Path) -> None:
    expected = reference(make(name, tmp_path), TOKENS)
    assert expected.std() > 0.3
    assert largest(tmp_path, expected, TOKENS) <= 1e-4
    assert read_model_info(tmp_path, {}).wrapper == f"{name}ForConditionalGeneration"
    check_architecture(tmp_path, {})


@pytest.mark.parametrize(
    ("name", "renames"),
    [
        ("Llava", [(r"^model\.language_model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head")]),
        ("Qwen2_5_VL", [(r"^model\.language_model\.", "model."), (r"^model\.visual", "visual")]),
    ],
)
def test_names_that_older_files_have(name: str, renames: list[tuple[str, str]], tmp_path: Path) -> None:
    expected = reference(make(name, tmp_path), TOKENS)
    state = load_file(tmp_path / "model.safetensors")
    for old, new in renames:
        state = {re.sub(old, new, key): tensor for key, tensor in state.items()}
    save_file(state, tmp_path / "model.safetensors")
    if name == "Qwen2_5_VL":  # which kept both configs on one level
        config = json.loads((tmp_path / "config.json").read_text())
        text = config.pop("text_config")
        (tmp_path / "config.json").write_text(json.dumps({**text, **config, "model_type": "qwen2_5_vl"}))
    assert largest(tmp_path, expected, TOKENS) <= 1e-4


def test_experts_that_files_have_turned(tmp_path: Path) -> None:
    """As the checkpoints of Qwen3-VL have theirs."""
    expected = reference(make("Qwen3VLMoe", tmp_path), TOKENS)
    state = load_file(tmp_path / "model.safetensors")
    for key in [key for key in state if re.search(r"experts\.(gate_up|down)_proj$", key)]:
        state[key] = state[key].transpose(1, 2).contiguous()
    save_file(state, tmp_path / "model.safetensors")
    assert largest(tmp_path, expected, TOKENS) <= 1e-4


def test_a_missing_key_is_what_the_wrappers_text_config_takes_for_it() -> None:
    known = {"qwen2_vl_text": "Qwen2VL", "qwen2_5_vl_text": "Qwen2_5_VL", "qwen3_vl_text": "Qwen3VL"}
    known |= {"qwen3_vl_moe_text": "Qwen3VLMoe", "glm4v_text": "Glm4v"}
    left_out = ("architectures", "rope_parameters", "head_dim", "layer_types", "tie_word_embeddings")
    for kind, name in known.items():
        theirs = getattr(transformers, f"{name}Config")().get_text_config()
        file = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": {"model_type": kind}}
        ours = hf_config(file, {}).values
        for key, value in ours.items():
            if hasattr(theirs, key) and key not in left_out:
                assert value == getattr(theirs, key) or key in ("sliding_window", "mlp_only_layers"), (kind, key)
        assert ours["rope_parameters"]["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert set(DEFAULTS) <= set(DECODERS)


def test_overrides_are_of_either_config(tmp_path: Path) -> None:
    make("Llava", tmp_path)
    for overrides in ({"rms_norm_eps": 0.5}, {"text_config": {"rms_norm_eps": 0.5}}):
        assert read_model_info(tmp_path, overrides).hf_config["rms_norm_eps"] == 0.5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"text_config": 3}, "text_config must be an object"),
        ({"text_config": {"model_type": "whisper"}}, "model_type='whisper', which is not supported"),
        ({"text_config": {"model_type": "llama", "hidden_act": "relu"}}, "hidden_act='relu'"),
    ],
)
def test_text_parts_that_cannot_run(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        hf_config({"architectures": ["LlavaForConditionalGeneration"], **config}, {})


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.input_layernorm.weight", "model.layers.3.input_layernorm.weight"),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.vision_tower.x", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("mlp1.0.weight", None),
        ("model.image_newline", None),
        ("audio_tower.layers.0.weight", None),
        ("talker.layers.0.weight", "talker.layers.0.weight"),  # a place for which there is not
    ],
)
def test_names(tensor: str, name: str | None) -> None:
    assert decoders_name(tensor) == name


def test_every_wrapper_is_one_of_transformers() -> None:
    for name in WRAPPERS - {"InternVLChatModel"}:
        assert hasattr(transformers, name), name
