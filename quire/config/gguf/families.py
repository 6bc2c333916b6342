"""Dense families of GGUF files, and which family a file is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.gguf.encoders import ENCODERS
from quire.config.gguf.family import GgufFamily
from quire.config.gguf.hybrid import HYBRID
from quire.config.gguf.metadata import Metadata
from quire.config.gguf.sparse import DEEPSEEK_V3, MIXTRAL, SPARSE
from quire.config.gguf.states import STATES
from quire.config.gguf.streams import STREAMS
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufTensor

# Tensors that are settings: `rotary.py` reads them.
SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_OUTER_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LATER_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}


def _qk_norms(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """StableLM."""
    config["use_parallel_residual"] = bool(metadata.get("use_parallel_residual", False))
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in tensors


DENSE: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", pairs=True, mlp_bias=True),
    "mistral3": GgufFamily("LlamaForCausalLM", pairs=True, mlp_bias=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", bias=None),
    "qwen3": GgufFamily("Qwen3ForCausalLM", sized=True),
    "exaone": GgufFamily("LlamaForCausalLM"),
    "gemma": GgufFamily("GemmaForCausalLM", plus_one=True, sized=True),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM", _OUTER_NORMS, plus_one=True, keys=_CAPS, windows=True, sized=True
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM", _OUTER_NORMS, plus_one=True, keys={"final_logit_softcapping": "final_logit_softcapping"},
        windows=True, sized=True,
    ),
    "phi3": GgufFamily("Phi3ForCausalLM", _FUSED, windows=True, partial=True, bias=None),
    "olmo2": GgufFamily("Olmo2ForCausalLM", _LATER_NORMS),
    "granite": GgufFamily(
        "GraniteForCausalLM", pairs=True, mlp_bias=True,
        keys={
            "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
    ),
    "command-r": GgufFamily("CohereForCausalLM", keys={"logit_scale": "logit_scale"}, eps="layer_norm_eps"),
    "cohere2": GgufFamily(
        "Cohere2ForCausalLM", keys={"logit_scale": "logit_scale"}, windows=True, eps="layer_norm_eps"
    ),
    "starcoder2": GgufFamily(
        "Starcoder2ForCausalLM", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, windows=True, eps="norm_epsilon",
        bias="use_bias",
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", pairs=True, mlp_bias=True),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM", {"post_attention_norm": "post_attention_layernorm"}, sized=True
    ),
    "arcee": GgufFamily("ArceeForCausalLM", pairs=True, mlp_bias=True),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        {
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        partial=True, sized=True,
    ),
    "exaone4": GgufFamily("Exaone4ForCausalLM", _LATER_NORMS, windows=True, bias=None, sized=True),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", bias="use_bias", sized=True),
    "hunyuan-dense": GgufFamily(
        "HunYuanDenseV1ForCausalLM",
        {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}, sized=True,
    ),
    "stablelm": GgufFamily(
        "StableLmForCausalLM",
        {
            "attn_q_norm.weight": "self_attn.q_layernorm.norms.{}.weight",
            "attn_k_norm.weight": "self_attn.k_layernorm.norms.{}.weight",
        },
        partial=True, eps="layer_norm_eps", bias="use_qkv_bias", read=_qk_norms,
    ),
    "nemotron": GgufFamily("NemotronForCausalLM", plus_one=True, partial=True, eps="norm_eps", mlp_bias=True),
}  # fmt: skip
FAMILIES = {**DENSE, **HYBRID, **SPARSE, **STATES, **STREAMS, **ENCODERS}
_MINISTRAL = GgufFamily(
    "Ministral3ForCausalLM", pairs=True, bias=None, sized=True, sharpened=1.0,
    keys={"attention.temperature_scale": "llama_4_scaling_beta"},
)  # fmt: skip


def gguf_family(metadata: Mapping[str, Any]) -> GgufFamily:
    """Raises ConfigError for a file of another family, or that does not say."""
    name = metadata.get("general.architecture")
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "mistral3" and metadata.get("mistral3.attention.temperature_scale"):
        return _MINISTRAL
    if name == "deepseek2" and metadata.get("deepseek2.expert_gating_func") == 2:
        return DEEPSEEK_V3
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"GGUF files of general.architecture={name!r} are not supported (known: {', '.join(sorted(FAMILIES))})",
            "model",
        )
    return FAMILIES[name]
