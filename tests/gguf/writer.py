"""GGUF files of tiny checkpoints, written by the format's own library: its names, its quantiser, its writer.

What the files' usual converter does to tensors and settings is done here after its description, without a line of the
engine's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from tests.gguf.conversions import CONVERSIONS, same
from tests.gguf.states import alone, beside

# Rows of queries and keys by pairs.
PERMUTED = (
    "llama", "granite", "granitemoe", "smollm3", "arcee", "mistral3", "granitehybrid", "nemotron_h",
)  # fmt: skip
ADDED_TO_1 = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next")
# Of config.json → of the file's own family.
KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "norm_epsilon": "attention.layer_norm_epsilon",
    "vocab_size": "vocab_size", "num_experts": "expert_count", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "logit_scale": "logit_scale",
    "norm_eps": "attention.layer_norm_epsilon", "use_parallel_residual": "use_parallel_residual",
    "n_routed_experts": "expert_count", "moe_num_experts": "expert_count", "moe_k": "expert_used_count",
    "n_shared_experts": "expert_shared_count", "moe_num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "moe_layer_start_index": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step", "moe_layer_interval": "interleave_moe_layer_step",
    "q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank",
    "conv_L_cache": "shortconv.l_cache", "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length", "moe_latent_size": "moe_latent_size",
    "altup_num_inputs": "altup.num_inputs", "altup_active_idx": "altup.active_idx",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
}  # fmt: skip
SLIDING = ("gemma2", "gemma3", "phi3", "cohere2", "exaone4", "gpt-oss", "phimoe", "gemma3n")


PLAIN = ("ffn_gate_inp", "_norm", "shortconv.conv", "ssm_conv1d", "position_embd", "token_types")


def kind_of(name: str, array: np.ndarray, kind: Type) -> Type:
    """Norms, biases and routers are never quantized; a type whose blocks do not fit gives way."""
    if array.ndim < 2 or name.endswith((".bias", "ssm_a", "ssm_d")) or any(part in name for part in PLAIN):
        return Type.F32
    size = gguf.GGML_QUANT_SIZES[kind][0]
    return kind if array.shape[-1] % size == 0 else Type.F16


def quantized(array: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    """By the library; types it has no quantiser for are drawn, with finite scales of the numbers' size."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        return drawn(array.shape, kind, rng)


def drawn(shape: tuple[int, ...], kind: Type, rng: np.random.Generator) -> np.ndarray:
    """Random blocks whose halves that are scales are of the size of tiny models' weights."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), dtype=np.uint8)
    for place, scale in SCALES.get(kind, ()):
        values = (rng.uniform(0.5, 1.5, raw.shape[:-1]) * scale).astype(np.float16)
        raw[..., place : place + 2] = values[..., None].view(np.uint8)
    if kind == Type.IQ1_M:  # the four highest bits of four words make its scale
        word = raw[..., 48:56].reshape(*raw.shape[:-1], 4, 2)
        half = (rng.uniform(0.5, 1.5, raw.shape[:-1]) * 0.02).astype(np.float16).view(np.uint16)
        for number in range(4):
            nibble = ((half >> (4 * number)) & 15).astype(np.uint8)
            word[..., number, 1] = (word[..., number, 1] & 0x0F) | (nibble << 4)
    return raw.reshape(*shape[:-1], -1)


# Where a block has float16 scales, and how large they are here.
SCALES = {
    Type.Q2_K: ((80, 0.01), (82, 0.01)), Type.Q3_K: ((108, 0.003),), Type.Q4_K: ((0, 0.0005), (2, 0.003)),
    Type.Q5_K: ((0, 0.0003), (2, 0.003)), Type.Q6_K: ((208, 0.0001),), Type.IQ4_NL: ((0, 0.002),),
    Type.IQ4_XS: ((0, 0.0002),), Type.IQ2_XXS: ((0, 0.005),), Type.IQ2_XS: ((0, 0.005),), Type.IQ2_S: ((0, 0.005),),
    Type.IQ3_XXS: ((0, 0.002),), Type.IQ3_S: ((0, 0.001),), Type.IQ1_S: ((0, 0.01),),
}  # fmt: skip


def write(
    folder: Path,
    file: Path,
    arch: str,
    kind: Callable[[str], Type],
    *,
    more: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    seed: int = 0,
    form: str = "",
    **options: Any,
) -> dict[str, torch.Tensor]:
    """A GGUF file of the checkpoint in a folder. kind: the type of a tensor by its name in the file. more: metadata
    besides, None takes a key out. form: what is done to it first, if not what is usual (`conversions.py`).

    Returns the checkpoint's tensors with the numbers that the file has for them.
    """
    config = json.loads((folder / "config.json").read_text())
    state = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    there, back = CONVERSIONS.get(form or arch, (same, same))
    state = there(state, config)
    writer = gguf.GGUFWriter(file, arch, **options)
    for key, value in metadata(config, arch, dict(more or {})).items():
        add(writer, f"{arch}.{key}", value)
    for key, value in (tokenizer or {}).items():
        add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH_NAMES and _arch(arch), _layers(config))
    rng = np.random.default_rng(seed)
    stands: dict[str, torch.Tensor] = {}
    for theirs, sources in _stacked(state, config).items():
        tensors = [converted(name, state[name], config, arch) for name in sources]
        array = np.stack(tensors) if len(sources) > 1 or re.search(r"\.experts\.\d", sources[0]) else tensors[0]
        module, _, end = theirs.rpartition(".")
        name = names.get_name(theirs) or f"{names.get_name(module)}.{end}"
        assert not name.startswith("None"), theirs
        chosen = kind_of(name, array, kind(name))
        raw = quantized(array, chosen, rng)
        writer.add_tensor(name, raw, raw_dtype=chosen)
        wide = gguf.quants.dequantize(raw, chosen).reshape(array.shape)
        parts = wide if wide.ndim > tensors[0].ndim else wide[None]
        for source, part in zip(sources, parts, strict=True):
            stands[source] = torch.from_numpy(restored(source, part, config, arch))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: tensor.contiguous() for name, tensor in back(stands, config).items()}


def _layers(config: Mapping[str, Any]) -> int:
    return int(config.get("num_hidden_layers") or len(config["layers_block_type"]))


def _arch(name: str) -> Any:
    return next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def metadata(config: dict[str, Any], arch: str, more: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, name in KEYS.items():
        if config.get(key) is not None and not (key == "logit_scale" and arch == "granite"):
            found[name] = config[key]
    if not config.get("num_attention_heads"):
        return {key: value for key, value in {**found, **alone(config, arch), **more}.items() if value is not None}
    found.setdefault("attention.head_count_kv", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found |= {"attention.key_length": size, "attention.value_length": size}
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    found["rope.freq_base"] = float(full.get("rope_theta", 10000.0))
    found["rope.dimension_count"] = int(size * full.get("partial_rotary_factor", 1.0))
    found |= _of_family(config, arch, {**rope, **full}) | beside(config, arch)
    if arch in ("bert", "nomic-bert"):
        found |= {"attention.causal": False, "attention.head_count_kv": None}
    if arch in SLIDING and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    return {key: value for key, value in {**found, **more}.items() if value is not None}


def _of_family(config: Mapping[str, Any], arch: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """What only some say, after the converter's description."""
    found: dict[str, Any] = {}
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1),
        }  # fmt: skip
    if arch == "deepseek2":
        rank, turning, nope = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        found |= {
            "attention.head_count_kv": 1, "attention.key_length": rank + turning, "attention.value_length": rank,
            "attention.key_length_mla": nope + turning, "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": turning,
        }  # fmt: skip
        if rope.get("mscale_all_dim"):
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if arch == "mistral3" and "llama_4_scaling_beta" in rope:
        found |= {
            "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
            "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
        }
    if arch == "llama4":
        found |= {
            "feed_forward_length": config["intermediate_size_mlp"],
            "expert_feed_forward_length": config["intermediate_size"],
        }
    if arch in ("gpt-oss", "minimax-m2", "hunyuan-moe"):
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if arch == "hunyuan-moe":
        found |= {
            "expert_used_count": config["moe_topk"],
            "expert_shared_feed_forward_length": config["intermediate_size"],
        }
    if arch in ("glm4moe", "minimax-m2"):
        found["expert_gating_func"] = 2
    if arch == "lfm2moe":
        found |= {"expert_gating_func": 2, "leading_dense_block_count": config["num_dense_layers"]}
    if arch in ("lfm2", "lfm2moe"):
        kinds = config["layer_types"]
        found["attention.head_count_kv"] = [config["num_key_value_heads"] * (kind != "conv") for kind in kinds]
        found["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
    if arch == "gemma3n":
        normal = torch.distributions.Normal(0, 1)
        shares = torch.tensor(config["activation_sparsity_pattern"])
        found["activation_sparsity_scale"] = normal.icdf(shares).tolist()
    if arch in ("exaone4", "gemma3n"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    return found


def _stacked(state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Tensors of the file by the names of the checkpoint; those of all experts are one."""
    found: dict[str, list[str]] = {}
    for name in sorted(state, key=_numbers):
        if config.get("tie_word_embeddings") and name.startswith("lm_head"):
            continue
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        found.setdefault(f"{match[1]}.{match[3]}" if match else name, []).append(name)
    return found


def _numbers(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def converted(name: str, tensor: torch.Tensor, config: Mapping[str, Any], arch: str) -> np.ndarray:
    array = tensor.numpy()
    if heads := _heads(name, config, arch):
        array = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if arch in ADDED_TO_1 and name.endswith("norm.weight") and "linear_attn" not in name:
        array = array + np.float32(1)
    return np.ascontiguousarray(array)


def restored(name: str, array: np.ndarray, config: Mapping[str, Any], arch: str) -> np.ndarray:
    if heads := _heads(name, config, arch):
        array = array.reshape(heads, len(array) // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if arch in ADDED_TO_1 and name.endswith("norm.weight") and "linear_attn" not in name:
        array = array - np.float32(1)
    return np.ascontiguousarray(array)


def _heads(name: str, config: Mapping[str, Any], arch: str) -> int:
    if arch not in PERMUTED:
        return 0
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0
