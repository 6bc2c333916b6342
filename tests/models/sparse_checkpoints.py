"""Tiny models with experts, one for every way to choose them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.models import checkpoints
from tests.models.cases import LATENT, SHARPENED, YARN

HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
QWEN3 = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN2 = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
GLM = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rope_parameters": HALF_ROPE,
    "num_mtp_layers": 0,
}  # fmt: skip
HY = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
SOLAR = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "intermediate_size": ...,
    "head_dim": 16,
}
MELLUM = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16, "sliding_window": 10}
EXAONE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LLAMA4 = {
    "head_dim": 16, "num_local_experts": 6, "intermediate_size": 40, "intermediate_size_mlp": 56, "floor_scale": 7,
    "attn_scale": 0.5, "num_hidden_layers": 4, "rms_norm_eps": 1e-3,
}  # fmt: skip
GPT_OSS = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}
DEEPSEEK = {
    **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK3 = {**DEEPSEEK, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
MISTRAL4 = {
    **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
    "rope_parameters": {**SHARPENED, "llama_4_scaling_beta": 0.2, "partial_rotary_factor": 0.4},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3-some-dense": (
        "Qwen3Moe",
        {**QWEN3, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3-window-biases": (
        "Qwen3Moe",
        {**QWEN3, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3-one-expert": ("Qwen3Moe", {**QWEN3, "num_experts_per_tok": 1}),
    "qwen3-all-experts": ("Qwen3Moe", {**QWEN3, "num_experts_per_tok": 8, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Moe", QWEN2),
    "qwen2-windows": (
        "Qwen2Moe",
        {**QWEN2, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 11}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.8, "eos_token_id": 2}),
    "olmoe-normed": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 2, "norm_topk_prob": True, "eos_token_id": 2}),
    "glm": ("Glm4Moe", {**GLM, "routed_scaling_factor": 1.5, "use_qk_norm": True}),
    "glm-groups": ("Glm4Moe", {**GLM, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "attention_bias": True}),
    "granite": (
        "GraniteMoe",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
            "attention_multiplier": 0.2, "logits_scaling": 0.7,
        },
    ),
    "granite-plain": ("GraniteMoe", {"num_local_experts": 4, "attention_bias": True}),
    "ernie": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 5, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "use_bias": False,
            "moe_layer_start_index": 1, "moe_layer_end_index": 3, "tie_word_embeddings": False,
        },
    ),
    "ernie-none-shared": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
        },
    ),
    "hunyuan": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": [1, 2, 3], "head_dim": 16}),
    "dots": (
        "Dots1",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "norm_topk_prob": True, "n_group": 2, "topk_group": 1,
        },
    ),
    "deepseek": (
        "Qwen2Moe:deepseek",
        {**QWEN2, "qkv_bias": False, "mlp_only_layers": [0], "shared_expert_intermediate_size": 48},
    ),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}),
    "minimax_m2-partial": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": HALF_ROPE},
    ),
    "hy_v3": ("HYV3", {**HY, "mlp_bias": True}),
    "hy_v3-types": ("HYV3", {**HY, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "solar_open": ("SolarOpen", {**SOLAR, "routed_scaling_factor": 1.5}),
    "solar_open-groups": ("SolarOpen", {**SOLAR, "n_group": 4, "topk_group": 2, "attention_bias": True}),
    "mellum": ("Mellum", {**MELLUM, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "mellum-dense": ("Mellum", {**MELLUM, "mlp_layer_types": ["dense", "sparse", "sparse"], "norm_topk_prob": False}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "phimoe-longrope": (
        "Phimoe",
        {
            "num_local_experts": 6, "sliding_window": 11, "router_jitter_noise": 0.3,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0], "short_mscale": 1.2, "long_mscale": 1.3,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "exaone_moe": ("ExaoneMoe", {**EXAONE, "sliding_window": 10, "n_group": 4, "topk_group": 2}),
    "exaone_moe-types": (
        "ExaoneMoe",
        {**EXAONE, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "flex_olmo": ("FlexOlmo", {"num_experts": 7, "num_experts_per_tok": 3}),
    "flex_olmo-normed": (
        "FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "granite_shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.7,
        },
    ),
    "llama4": ("Llama4Text", {**LLAMA4, "attention_chunk_size": 16}),
    "llama4-interleaved": (
        "Llama4Text",
        {
            **LLAMA4, "num_hidden_layers": 5, "attention_chunk_size": 9, "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3, "use_qk_norm": False, "attention_bias": True, "num_key_value_heads": 4,
        },
    ),
    "llama4-types": (
        "Llama4Text",
        {
            **LLAMA4, "layer_types": [CHUNKED] * 3, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 21,
            "moe_layers": [0], "attn_temperature_tuning": False, "num_hidden_layers": 3,
        },
    ),
    "gpt_oss": ("GptOss", {**GPT_OSS, "sliding_window": 10}),
    "gpt_oss-plain-rope": (
        "GptOss",
        {
            **GPT_OSS, "num_experts_per_tok": 2, "sliding_window": 6, "layer_types": [FULL, SLIDING, SLIDING],
            "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "num_key_value_heads": 1,
        },
    ),
    "deepseek2": ("DeepseekV2", {**DEEPSEEK, "routed_scaling_factor": 1.5, "rope_parameters": SHARPENED}),
    "deepseek2-groups": (
        "DeepseekV2",
        {
            **DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None,
            "mlp_bias": True, "first_k_dense_replace": 0,
        },
    ),
    "deepseek3": ("DeepseekV3", {**DEEPSEEK3, "rope_parameters": SHARPENED}),
    "deepseek3-halves-biases": (
        "DeepseekV3",
        {**DEEPSEEK3, "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 1},
    ),
    "kimi2": (
        "DeepseekV3",
        {**DEEPSEEK3, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
    "mistral4": ("Mistral4", {**MISTRAL4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}),
    "mistral4-groups": (
        "Mistral4",
        {
            **MISTRAL4, "n_group": 4, "topk_group": 2, "q_lora_rank": None, "rope_interleave": False,
            "norm_topk_prob": False, "attention_bias": True,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 0.4},
        },
    ),
    "glm-lite": ("Glm4MoeLite", {**DEEPSEEK, "mlp_layer_types": ["sparse", "dense", "sparse"], "v_head_dim": 24}),
    "glm-lite-usual": ("Glm4MoeLite", {**DEEPSEEK, "n_group": 2, "rope_interleave": False}),
}  # fmt: skip
_FILES = {
    "Qwen2Moe:deepseek": "deepseek", "DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3",
    "Glm4MoeLite": "glm4_moe_lite", "Mistral4": "mistral4",
    "Dots1": "dots1", "Ernie4_5_Moe": "ernie4_5_moe", "Glm4Moe": "glm4_moe", "GraniteMoe": "granitemoe",
    "HunYuanMoEV1": "hunyuan_v1_moe", "Mixtral": "mixtral", "Olmoe": "olmoe", "Qwen2Moe": "qwen2_moe",
    "Qwen3Moe": "qwen3_moe", "MiniMaxM2": "minimax_m2", "HYV3": "hy_v3", "SolarOpen": "solar_open",
    "Mellum": "mellum", "Phimoe": "phimoe", "ExaoneMoe": "exaone_moe", "FlexOlmo": "flex_olmo",
    "GraniteMoeShared": "granitemoeshared",
    "GptOss": "gpt_oss", "Llama4Text": "llama4",
}  # fmt: skip
FAMILIES = {file: [name for name, (made, _) in CASES.items() if made == cls] for cls, file in _FILES.items()}
"""The cases of each family, called as its file."""
TWINS = ("deepseek",)
SHARED = (
    "qwen3", "qwen3-some-dense", "qwen2", "mixtral", "glm-groups", "dots", "granite", "ernie", "hunyuan", "hy_v3",
    "solar_open", "mellum", "phimoe", "exaone_moe", "granite_shared", "gpt_oss", "deepseek2-groups",
    "deepseek3-halves-biases", "llama4", "mistral4",
)  # fmt: skip
"""Those that ranks can share."""


def make(case: str, **more: Any) -> transformers.PreTrainedModel:
    family, config = CASES[case]
    model = checkpoints.make(family, **{**config, **more})
    with torch.no_grad():
        for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
            if name.endswith("e_score_correction_bias"):
                torch.manual_seed(1)
                tensor.normal_(0, 0.3)
            elif name.endswith("shared_expert_gate.weight") and family == "Qwen2Moe:deepseek":
                tensor.zero_()
    return model
