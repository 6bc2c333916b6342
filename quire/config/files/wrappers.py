"""Checkpoints of models that also see: their text part is one of the decoders there are, under names of its own.

The decoder's config is lifted out of the wrapper's, and `decoders_name` says which tensors are the decoder's; what
belongs to the vision part is not read. Rotary positions of text alone are the usual ones: the wrappers that give a
token three positions (time, height, width; `mrope_section` says which columns turn by which) give a token of text the
same number three times, so each column turns by that number, as it does without sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.config.families import family_of
from quire.config.reading import read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

# The decoder by the `model_type` of what it is lifted from.
DECODERS = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
WRAPPERS = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLChatModel",
        "InternVLForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
    }
)
# What their decoders' configs are where they say nothing, unlike the decoders by themselves.
_QWEN2_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80,
    "rope_theta": 1e6,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl_text": {"max_position_embeddings": 128000, "rope_theta": 5e5},
    "qwen3_vl_moe_text": {
        "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
        "max_position_embeddings": 128000, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "rope_theta": 5e5,
    },
    "glm4v_text": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
}  # fmt: skip
# What their layers do whatever the config says.
_FORCED: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"attention_bias": True},
}
_TIED = ("Gemma3", "Mistral3", "InternVLFor")
_WHOLE_HEADS = ("glm4v_text",)  # whose heads are together as wide as a hidden state, if nothing else is said
_INSIDE = ("text_config", "llm_config")
# Of the whole model, said beside the decoder's config.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
_MROPE = ("mrope_section", "mrope_interleaved")
_DECODERS_NAMES = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_BEFORE = (
    "model.language_model", "language_model.model", "language_model", "model.text_model", "text_model",
    "model.language_model.model",
)  # fmt: skip
_HEAD = re.compile(r"^(?:language_model\.)?lm_head\.")
_NOT_TEXT = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|vision_embed_tokens|audio_tower|embed_audio|visual|multi_modal_projector|embed_vision|mlp1|"
    r"connector|image_newline)(?:\.|$)"
)


def is_wrapper(architecture: str) -> bool:
    return architecture in WRAPPERS


def lift(file: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The decoder's config out of a wrapper's. Raises ConfigError if there is none, or none that is known."""
    inside = next((file[key] for key in _INSIDE if file.get(key) is not None), None)
    if inside is None:  # as the first of Qwen's kept it, all on one level
        inside = {key: value for key, value in file.items() if key != "vision_config"}
    if not isinstance(inside, Mapping):
        raise ConfigError(f"config.json: text_config must be an object, got {shown(inside)}", "text_config")
    kind = inside.get("model_type", "mistral" if architecture.startswith("Mistral3") else "llama")
    if kind not in DECODERS:
        raise ConfigError(
            f"config.json: the text part of {architecture} is of model_type={shown(kind)}, which is not supported: "
            f"there are {', '.join(sorted(DECODERS))}",
            "text_config",
        )
    tied = file.get("tie_word_embeddings", inside.get("tie_word_embeddings"))
    shared = {key: file[key] for key in _SHARED if file.get(key) is not None and inside.get(key) is None}
    names = family_of(DECODERS[kind]).aliases
    told = {names.get(key, key) for key in inside}
    usual = {key: value for key, value in DEFAULTS.get(kind, {}).items() if key not in told}
    lifted = {**usual, **inside, **shared, **_FORCED.get(kind, {})}
    if kind in _WHOLE_HEADS and lifted.get("head_dim") is None and "hidden_size" in lifted:
        lifted["head_dim"] = read_positive(lifted, "hidden_size") // read_positive(lifted, "num_attention_heads")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(lifted.get(key), Mapping):
            lifted[key] = _of_text(lifted[key])
            if "rope_theta" in lifted[key]:
                lifted.pop("rope_theta", None)
    lifted["architectures"] = [DECODERS[kind]]
    lifted["tie_word_embeddings"] = architecture.startswith(_TIED) if tied is None else tied
    lifted.pop("model_type", None)
    return lifted


def lifted_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Of the wrapper's config, or of the decoder's: both may be said."""
    inside: Mapping[str, Any] = next((overrides[key] for key in _INSIDE if isinstance(overrides.get(key), Mapping)), {})
    return {**{key: value for key, value in overrides.items() if key not in (*_INSIDE, "vision_config")}, **inside}


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without what says how pictures are laid out."""
    plain = {key: value for key, value in rope.items() if key not in _MROPE}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    return plain


def decoders_name(tensor: str) -> str | None:
    """What a decoder's own checkpoint would call it; None: it is not the decoder's."""
    if _NOT_TEXT.match(tensor):
        return None
    if _HEAD.match(tensor):
        return tensor.removeprefix("language_model.")
    return _DECODERS_NAMES.sub("model.", tensor)


def files_names(module: str) -> tuple[str, ...]:
    """What wrappers' files may call a module of the decoder: whose settings name it so."""
    if module == "lm_head":
        return ("language_model.lm_head",)
    inside = module.removeprefix("model.")
    return tuple(f"{before}.{inside}" for before in _BEFORE) if inside != module else ()
