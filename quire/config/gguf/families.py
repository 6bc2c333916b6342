"""Families of GGUF files: what of ours each is, what its tensors are called, and what its converters did to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.foundation.errors import ConfigError

_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SPARSE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.w1",
    "ffn_up_exps": "mlp.experts.{}.w3",
    "ffn_down_exps": "mlp.experts.{}.w2",
}
_OUTER_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Tensors that are settings: `settings.py` reads them.
SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Tensors that are looked up or added, and not multiplied by: they are no blocks here.
NOT_MATRICES = ("token_embd", "ffn_gate_inp", "ffn_gate_inp_shexp")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """names: of tensors where they are not Llama's. pairs: rows of queries and keys are ordered so that neighbours turn
    together, and are put back. plus_one: weights of norms have 1 added. keys: more metadata that config.json knows, by
    its names there. fixed: what the files leave unsaid."""

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    plus_one: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    head_from_metadata: bool = True
    windows: bool = False
    partial: bool = False  # a share of each head may turn


_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", pairs=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM", _SHARED,
        keys={**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
    ),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", keys=_EXPERTS, fixed={"norm_topk_prob": True}),
    "gemma": GgufFamily("GemmaForCausalLM", plus_one=True),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _OUTER_NORMS, plus_one=True, keys=_CAPS, windows=True),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM", _OUTER_NORMS, plus_one=True, keys={"final_logit_softcapping": "final_logit_softcapping"},
        windows=True,
    ),
    "phi3": GgufFamily("Phi3ForCausalLM", _FUSED, windows=True, partial=True),
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM",
        {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "olmoe": GgufFamily(
        "OlmoeForCausalLM",
        keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fixed={"norm_topk_prob": False},
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM", pairs=True,
        keys={
            "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
    ),
    "command-r": GgufFamily("CohereForCausalLM", keys={"logit_scale": "logit_scale"}),
    "cohere2": GgufFamily("Cohere2ForCausalLM", keys={"logit_scale": "logit_scale"}, windows=True),
    "starcoder2": GgufFamily(
        "Starcoder2ForCausalLM", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, windows=True
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", pairs=True),
    "seed_oss": GgufFamily("SeedOssForCausalLM", {"post_attention_norm": "post_attention_layernorm"}),
    "arcee": GgufFamily("ArceeForCausalLM", pairs=True),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        {
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        partial=True,
    ),
}  # fmt: skip
_MIXTRAL = GgufFamily(
    "MixtralForCausalLM", _SPARSE, pairs=True,
    keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
)  # fmt: skip


def gguf_family(metadata: Mapping[str, Any]) -> GgufFamily:
    """Raises ConfigError for a file of another family, or that does not say."""
    name = metadata.get("general.architecture")
    if name == "llama" and metadata.get("llama.expert_count"):
        return _MIXTRAL
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"GGUF files of general.architecture={name!r} are not supported (known: {', '.join(FAMILIES)})", "model"
        )
    return FAMILIES[name]


def decoders_name(family: GgufFamily, tensor: str) -> str | None:
    """What Hugging Face's form calls a tensor, `{}` standing for the number of an expert; None: nobody knows it."""
    match = _NAME.fullmatch(tensor)
    if match is None:
        return None
    layer, name, kind = match.groups()
    if layer is None:
        known = _OUTSIDE.get(name)
    elif (known := family.names.get(name, _DENSE.get(name))) is not None:
        known = f"model.layers.{layer}.{known}"
    return None if known is None else f"{known}.{kind}"


def is_matrix(tensor: str) -> bool:
    """Whether a tensor of two dimensions is multiplied by, and so may stay in blocks."""
    match = _NAME.fullmatch(tensor)
    return match is not None and match[3] == "weight" and match[2] not in NOT_MATRICES
