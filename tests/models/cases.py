"""The families, and tiny configs of each that cover what changes the maths: (transformers' class, its config)."""

from __future__ import annotations

from typing import Any

from quire.config.families import families

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

FULL, SLIDING = "full_attention", "sliding_attention"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-head-dim": ("Llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": True}),
    "mistral-wide-window": ("Mistral", {"sliding_window": 30, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    "qwen2-upper-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "ministral": ("Ministral", {"head_dim": 12, "sliding_window": 11, "layer_types": [SLIDING, FULL, SLIDING]}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-windows": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "layer_types": [FULL, SLIDING, FULL]},
    ),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}}),
}

_BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}
_YARN_BELOW = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
_MIXED = [SLIDING, FULL, SLIDING]
_GEMMA3N = {
    "head_dim": 16, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 9, "laurel_rank": 8,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING], "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 97,
}  # fmt: skip
CASES |= {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma-biases": ("Gemma", {"head_dim": 12, "attention_bias": True, "hidden_act": "gelu", "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma2-untied": (
        "Gemma2",
        {
            "head_dim": 12,
            "layer_types": [FULL, FULL, SLIDING],
            "sliding_window": 20,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2-without-caps": (
        "Gemma2",
        {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 11, "num_hidden_layers": 7}),
    "gemma3-rope": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 11,
            "layer_types": _MIXED,
            "rope_parameters": _BY_LAYER,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 10,
        },
    ),
    "gemma3n": ("Gemma3nText", {**_GEMMA3N, "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0, 0.0]}),
    "gemma3n-streams": (
        "Gemma3nText",
        {
            **_GEMMA3N,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "rope_parameters": _BY_LAYER,
            "final_logit_softcapping": 3.0,
            "hidden_activation": "gelu",
            "intermediate_size": [40, 80, 64, 48],
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 1.5}),
    "cohere-norms": (
        "Cohere",
        {"logit_scale": 2.0, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2": ("Cohere2", {"logit_scale": 1.5, "sliding_window": 10, "num_hidden_layers": 4}),
    "cohere2-biases": (
        "Cohere2",
        {"sliding_window": 10, "layer_types": _MIXED, "attention_bias": True, "logit_scale": 2.0},
    ),
    "olmo": ("Olmo", {}),
    "olmo-clipped": ("Olmo", {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo2-biases": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"sliding_window": 10, "num_hidden_layers": 4}),
    "olmo3-yarn": ("Olmo3", {"sliding_window": 10, "layer_types": _MIXED, "rope_parameters": _YARN_BELOW}),
    "exaone4": ("Exaone4", {"sliding_window": 10, "num_hidden_layers": 4}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": [FULL] * 3, "tie_word_embeddings": True}),
    "exaone4-types": ("Exaone4", {"sliding_window": 9, "layer_types": _MIXED}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "ministral3-window": (
        "Ministral3",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
}
_GPT = {"num_key_value_heads": ..., "intermediate_size": ...}
_MPT = {"max_position_embeddings": ..., "max_seq_len": 128}
CASES |= {
    "phi": ("Phi", {}),
    "phi-norms": ("Phi", {"qk_layernorm": True, "hidden_act": "gelu", "num_key_value_heads": 4}),
    "phi3": ("Phi3", {"tie_word_embeddings": True}),
    "phi3-window": ("Phi3", {"sliding_window": 10, "partial_rotary_factor": 0.5, "num_key_value_heads": 1}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128, "max_position_embeddings": 128},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5},
    ),
    "granite-biases": ("Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3}),
    "hyperclovax": (
        "HyperCLOVAX",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.8, "head_dim": 16},
    ),
    "hyperclovax-plain": (
        "HyperCLOVAX",
        {"use_post_norm": False, "attention_multiplier": 0.3, "mlp_bias": True, "attention_bias": True},
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm-plain": ("Glm", {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "stablelm": ("StableLm", {"hidden_size": 64}),
    "stablelm-norms": ("StableLm", {"hidden_size": 64, "qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 9, "use_bias": False, "hidden_act": "gelu"}),
    "gpt_neox": ("GPTNeoX", {"hidden_size": 64}),
    "gpt_neox-sequential": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
    ),
    "gpt2": ("GPT2", {**_GPT}),
    "gpt2-scales": (
        "GPT2",
        {**_GPT, "scale_attn_by_inverse_layer_idx": True, "n_inner": 70, "scale_attn_weights": False},
    ),
    "gpt_bigcode": ("GPTBigCode", {**_GPT}),
    "gpt_bigcode-heads": ("GPTBigCode", {**_GPT, "multi_query": False, "n_inner": 70}),
    "gptj": ("GPTJ", {**_GPT, "rotary_dim": 8}),
    "opt": ("OPT", {**_GPT, "ffn_dim": 80}),
    "opt-after": ("OPT", {**_GPT, "ffn_dim": 80, "do_layer_norm_before": False, "enable_bias": False}),
    "opt-plain": (
        "OPT",
        {
            **_GPT,
            "ffn_dim": 80,
            "_remove_final_layer_norm": True,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
    ),
    "falcon": ("Falcon", {**_GPT}),
    "falcon-new": ("Falcon", {**_GPT, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-new-one-norm": (
        "Falcon",
        {**_GPT, "new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "Falcon",
        {**_GPT, "parallel_attn": False, "multi_query": False, "ffn_hidden_size": 60, "bias": True},
    ),
    "falcon-alibi": (
        "Falcon",
        {
            **_GPT,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "_attn_implementation": "sdpa",  # the other one adds the slopes twice
        },
    ),
    "bloom": ("Bloom", {**_GPT}),
    "bloom-heads": ("Bloom", {**_GPT, "num_attention_heads": 6, "tie_word_embeddings": False}),
    "mpt": ("Mpt", {**_GPT, **_MPT}),
    "mpt-heads": (
        "Mpt",
        {**_GPT, **_MPT, "num_attention_heads": 6, "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3}},
    ),
    "nemotron": ("Nemotron", {"hidden_size": 64}),
    "nemotron-biases": ("Nemotron", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu"}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "seed_oss-biases": ("SeedOss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3-windows": (
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 10,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "apertus": ("Apertus", {}),
    "apertus-biases": ("Apertus", {"attention_bias": True, "head_dim": 16}),
    "arcee": ("Arcee", {}),
    "arcee-biases": ("Arcee", {"mlp_bias": True, "attention_bias": True, "head_dim": 16}),
    "helium": ("Helium", {"head_dim": 12}),
    "helium-biases": ("Helium", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "ernie4_5-biases": ("Ernie4_5", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan_v1_dense-alpha": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0},
        },
    ),
    "cwm": ("Cwm", {"head_dim": 12, "sliding_window": 10, "num_hidden_layers": 5}),
    "cwm-types": ("Cwm", {"head_dim": 16, "sliding_window": 12, "layer_types": _MIXED, "rope_parameters": LLAMA3}),
    "jais2": ("Jais2", {}),
    "jais2-plain": ("Jais2", {"attention_bias": False, "mlp_bias": False, "hidden_act": "gelu"}),
}

_NO_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_PURE: dict[str, Any] = dict.fromkeys(_NO_ATTENTION, ...)
_MAMBA2 = {**_PURE, "num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8}
_MAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 8}
_GRANITE = {
    "shared_intermediate_size": 40, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.6, "logits_scaling": 0.7, "position_embedding_type": "nope",
}  # fmt: skip
_NEMOTRON = {
    "num_hidden_layers": ..., "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 3, "ssm_state_size": 8,
    "head_dim": 12,
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}  # fmt: skip
_ZAMBA = {
    "num_hidden_layers": 4, "n_mamba_heads": 6, "mamba_ngroups": 2, "mamba_d_state": 8, "adapter_rank": 7,
    "num_key_value_heads": 4,
}  # fmt: skip
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 6, "use_mamba_kernels": False}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", _MAMBA2),
    "mamba2-biases": (
        "Mamba2",
        {**_MAMBA2, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": True,
         "time_step_limit": (0.3, 0.9), "n_groups": 1},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "bamba-biases": (
        "Bamba",
        {**_MAMBA, "attn_layer_indices": [0, 2], "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True,
         "mamba_conv_bias": False, "mamba_d_conv": 3, "time_step_limit": (0.1, 1.0)},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**_MAMBA, **_GRANITE, "num_local_experts": 0, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "granitemoehybrid-experts": (
        "GraniteMoeHybrid",
        {**_MAMBA, **_GRANITE, "num_local_experts": 5, "layer_types": ["attention", "mamba", "mamba"],
         "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "nemotron_h": ("NemotronH", {**_NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"]}),
    "nemotron_h-biases": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["attention", "mamba", "mlp"], "use_bias": True, "mlp_bias": True,
         "use_conv_bias": False, "mlp_hidden_act": "gelu", "time_step_min": 0.6},
    ),
    "nemotron_h-experts": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 8,
         "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
         "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2},
    ),
    "nemotron_h-latent": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["moe", "mamba", "attention"], "n_routed_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
         "moe_latent_size": 24, "norm_topk_prob": False},
    ),
    "falcon_h1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 96}),
    "falcon_h1-scales": (
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
         "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.4, "attention_in_multiplier": 1.5,
         "attention_out_multiplier": 0.7, "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2,
         "ssm_multipliers": [0.5, 1.1, 1.3, 0.9, 0.7], "mlp_multipliers": [0.6, 1.4], "attention_bias": True,
         "projectors_bias": True, "mamba_proj_bias": True, "mlp_bias": True},
    ),
    "qwen3_next": ("Qwen3Next", {**_DELTA, "num_experts": 0, "num_hidden_layers": 4}),
    "qwen3_next-experts": (
        "Qwen3Next",
        {**_DELTA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "attention_bias": True,
         "shared_expert_intermediate_size": 32, "mlp_only_layers": [0], "tie_word_embeddings": True,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 2},
    ),
    "qwen3_5": ("Qwen3_5Text", {**_DELTA, "num_hidden_layers": 4}),
    "qwen3_5-biases": (
        "Qwen3_5Text",
        {**_DELTA, "attention_bias": True, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3,
         "layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2-biases": (
        "Lfm2",
        {"full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
         "tie_word_embeddings": False},
    ),
    "lfm2_moe-experts": (
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 24, "num_dense_layers": 1, "routed_scaling_factor": 1.3},
    ),
    "lfm2_moe-plain": (
        "Lfm2Moe",
        {"layer_types": ["full_attention", "conv", "conv"], "num_experts": 5, "num_experts_per_tok": 2,
         "moe_intermediate_size": 24, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "linear_key_head_dim": 10,
         "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ),
    "olmo_hybrid-biases": (
        "OlmoHybrid",
        {"attention_bias": True, "linear_allow_neg_eigval": False, "linear_num_key_heads": 2, "linear_key_head_dim": 12,
         "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
         "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "zamba2": (
        "Zamba2",
        {**_ZAMBA, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_attention_heads": 4},
    ),
    "zamba2-blocks": (
        "Zamba2",
        {**_ZAMBA, "layers_block_type": ["hybrid"] * 3, "num_hidden_layers": 3, "num_mem_blocks": 2,
         "use_shared_attention_adapter": True, "use_mem_rope": True, "add_bias_linear": True, "time_step_min": 0.05,
         "hidden_act": "silu", "intermediate_size": 24, "adapter_rank": 3},
    ),
    "zamba2-untied": (
        "Zamba2",
        {**_ZAMBA, "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"], "num_mem_blocks": 2,
         "use_shared_attention_adapter": True, "tie_word_embeddings": False},
    ),
    "mamba": ("Mamba", {**_PURE, "state_size": 6}),
    "mamba-biases": (
        "Mamba",
        {**_PURE, "use_bias": True, "use_conv_bias": False, "time_step_rank": 5, "conv_kernel": 3, "expand": 1,
         "tie_word_embeddings": False},
    ),
    "falcon_mamba": ("FalconMamba", {**_PURE, "state_size": 6, "mixer_rms_eps": 1e-2}),
    "jamba": ("Jamba", {**_JAMBA, "num_experts": 1, "num_experts_per_tok": 1}),
    "jamba-experts": (
        "Jamba",
        {**_JAMBA, "num_experts": 5, "expert_layer_offset": 0, "attn_layer_offset": 0, "attn_layer_period": 3,
         "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": 4, "tie_word_embeddings": True},
    ),
    "minimax-experts": (
        "MiniMax",
        {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "full_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.2, "block_size": 16},
    ),
    "qwen3_5_moe-experts": (
        "Qwen3_5MoeText",
        {**_DELTA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 32, "num_hidden_layers": 4},
    ),
    "falcon_h1-norm": ("FalconH1", {**_MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_conv_bias": False}),
}  # fmt: skip

# "Llama:internlm": a checkpoint of Llama's, turned into one of InternLM's (`tests/models/twins.py`).
TWIN_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm": ("Llama:internlm", {"num_key_value_heads": 4, "attention_bias": True}),
    "internlm2": ("Llama:internlm2", {}),
    "internlm2-biases": ("Llama:internlm2", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "internlm3": ("SeedOss:internlm3", {"head_dim": 16}),
    "internlm3-biases": ("SeedOss:internlm3", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "minicpm": (
        "Granite:minicpm",
        {
            "embedding_multiplier": 5.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "attention_multiplier": 12**-0.5,
            "tie_word_embeddings": True,
        },
    ),
    "mimo": ("Qwen2:mimo", {}),
    "exaone": ("Llama:exaone", {"rope_parameters": LLAMA3}),
    "qwen": ("Qwen2:qwen", {"num_key_value_heads": 4}),
    "orion": ("StableLm:orion", {"partial_rotary_factor": 1.0}),
    "baichuan": ("Llama:baichuan", {"num_key_value_heads": 4}),
    "baichuan-alibi": ("Llama:baichuan_alibi", {"num_key_value_heads": 6, "num_attention_heads": 6}),
    "chatglm": ("Glm:chatglm", {"head_dim": 16}),
    "chatglm-base": (
        "Glm:chatglm",
        {
            "head_dim": 12,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
        },
    ),
}
CASES |= HYBRIDS
CASES |= {
    "vaultgemma": ("VaultGemma", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "vaultgemma-types": (
        "VaultGemma",
        {"head_dim": 12, "sliding_window": 9, "layer_types": _MIXED, "attn_logit_softcapping": 2.0},
    ),
    **TWIN_CASES,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
}
SHARPENED = {**YARN, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
CASES |= {
    "minicpm3": ("MiniCPM3", {**LATENT, "dim_model_base": 32, "scale_depth": 1.1, "scale_emb": 3.0}),
    "minicpm3-plain": (
        "MiniCPM3",
        {
            **LATENT,
            "q_lora_rank": None,
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
        },
    ),
    "youtu": ("Youtu", {**LATENT}),
    "youtu-yarn": ("Youtu", {**LATENT, "rope_parameters": SHARPENED, "rope_interleave": False, "q_lora_rank": None}),
}

_KIMI = {
    **LATENT, "q_lora_rank": None, "linear_num_heads": 3, "linear_head_dim": 12, "num_local_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
}  # fmt: skip
KIMI: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinear", {**_KIMI, "layer_types": ["linear_attention", FULL, "linear_attention"]}),
    "kimi_linear-groups": (
        "KimiLinear",
        {
            **_KIMI, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2,
            "linear_conv_kernel_dim": 3, "num_hidden_layers": 5, "mlp_layer_types": ["sparse"] * 4 + ["dense"],
            "attention_bias": True,
        },
    ),
}  # fmt: skip
HYBRIDS |= KIMI
CASES |= KIMI

FAMILIES = [name for name in CASES if name in families()]
"""The main case of each family, called as its file."""
TWINS = [name for name in TWIN_CASES if name in FAMILIES]
USUAL = ("llama", "gemma2", "gemma3", "cohere2", "olmo3", "phi3", "gpt_neox", "gpt2", "falcon", "granite")
"""Whose tests run by default, of the sweeps that take a second a family."""
