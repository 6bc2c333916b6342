"""Classes of transformers that run through it on our cache, and tiny configs of each: (transformers' name, config)."""

from __future__ import annotations

from typing import Any

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FULL, SLIDING = "full_attention", "sliding_attention"
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip

FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**EXPERTS, "sliding_window": 9, "num_dense_layers": 1, "head_dim": 16}),
    "aria_text": ("AriaText", {"head_dim": 16, "moe_num_experts": 4, "moe_topk": 2}),
    "bitnet": ("BitNet", {}),
    "ctrl": ("CTRL", {"n_embd": 48, "n_head": 4, "n_layer": 3, "dff": 80, "n_positions": 128}),
    "diffllama": ("DiffLlama", {"head_dim": 16}),
    "exaone_moe": ("ExaoneMoe", {**EXPERTS, "sliding_window": 9, "n_group": 1, "topk_group": 1}),
    "flex_olmo": ("FlexOlmo", {**EXPERTS}),
    "granitemoeshared": ("GraniteMoeShared", {**EXPERTS, "shared_intermediate_size": 32}),
    "granite_swa": ("GraniteSWA", {"sliding_window": 9}),
    "hrm_text": ("HrmText", {"head_dim": 16}),
    "hy_v3": ("HYV3", {**EXPERTS, "head_dim": 16, "first_k_dense_replace": 1}),
    "jetmoe": ("JetMoe", {**EXPERTS, "kv_channels": 16}),
    "laguna": ("Laguna", {**EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    "llama4_text": (
        "Llama4Text",
        {**EXPERTS, "head_dim": 16, "attention_chunk_size": 16, "num_hidden_layers": 4, "intermediate_size_mlp": 80},
    ),
    "mellum": ("Mellum", {**EXPERTS, "head_dim": 16}),
    "minimax_m2": ("MiniMaxM2", {**EXPERTS, "head_dim": 16}),
    "modernbert_decoder": ("ModernBertDecoder", {"local_attention": 16, "global_attn_every_n_layers": 2}),
    "nanochat": ("NanoChat", {}),
    "persimmon": ("Persimmon", {}),
    "phimoe": ("Phimoe", {**EXPERTS, "sliding_window": 9}),
    "solar_open": ("SolarOpen", {**EXPERTS, "n_routed_experts": 4, "head_dim": 16, "n_group": 1, "topk_group": 1}),
    "youtu": ("Youtu", {**LATENT}),
}
USUAL = ("afmoe", "granite_swa", "modernbert_decoder", "youtu")
"""What runs by default: windows, told in two ways; sinks; experts, merged on the way in; latent attention."""
