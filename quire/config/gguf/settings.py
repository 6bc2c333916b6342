"""What a GGUF file says of its model, as config.json and generation_config.json would."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.config.gguf.families import SETTINGS, GgufFamily, decoders_name, gguf_family, is_matrix
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import PLAIN, GgufHeader, GgufTensor
from quire.foundation.json_file import shown

_SIZES = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}  # fmt: skip
_EPS = {
    "CohereForCausalLM": "layer_norm_eps", "Cohere2ForCausalLM": "layer_norm_eps",
    "Starcoder2ForCausalLM": "norm_epsilon",
}  # fmt: skip
# What is said twice, or of other programs.
_SAID_ELSEWHERE = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_rms_epsilon",
                   "attention.layer_norm_epsilon", "interleave_moe_layer_step", "quantized_by")  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,),
    "leading_dense_block_count": (0,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
    "nextn_predict_layers": (0,), "use_parallel_residual": (True,), "logit_scale": (0, 1),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,), "attention.sliding_window": (0,), "pooling_type": (0,),
}  # fmt: skip
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of those whose queries are scaled by hidden size and heads
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class _Metadata:
    """Of the model's own family, by key; each that is read is known, and the others are not."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._prefix = f"{metadata['general.architecture']}."
        self._values = {k.removeprefix(self._prefix): v for k, v in metadata.items() if k.startswith(self._prefix)}
        self.known: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value of a list that holds one and the same for every layer is that one. Raises ConfigError."""
        self.known.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list) and key in _SIZES:
            if len(set(value)) != 1:
                raise ConfigError(f"{self._prefix}{key} differs by layer, which is not supported", "model")
            return value[0]
        return value

    def number(self, key: str, kind: type = int) -> Any:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int) or value <= 0:
            raise ConfigError(f"{self._prefix}{key} must be a number > 0, got {shown(value)}", "model")
        return value

    def refuse_others(self) -> None:
        """Raises ConfigError for what would change the answer if anybody knew it."""
        strange = []
        for key, value in self._values.items():
            if key in self.known or key in _SAID_ELSEWHERE or value in _NEUTRAL.get(key, ()):
                continue
            strange.append(f"{self._prefix}{key}={shown(value)}")
        if strange:
            raise ConfigError(
                f"the GGUF file has settings that are not supported: {', '.join(sorted(strange))}", "model"
            )


def config_of(header: GgufHeader, parts: Mapping[str, Path]) -> dict[str, Any]:
    """config.json of a GGUF file. parts: which of its files each tensor is in.

    Raises ConfigError for a family, a setting or a tensor that is not known.
    """
    family, metadata = gguf_family(header.metadata), _Metadata(header.metadata)
    config: dict[str, Any] = {"architectures": [family.architecture], **family.fixed}
    metadata.get("attention.head_count_kv")
    for key, name in _SIZES.items():
        if key == "attention.head_count_kv" and metadata.get(key) is None:
            continue
        config[name] = metadata.number(key)
    eps = next((metadata.get(key) for key in _SAID_ELSEWHERE if "epsilon" in key and metadata.get(key)), None)
    if eps is None:
        raise ConfigError(
            "the GGUF file does not say the epsilon of its norms (attention.layer_norm_*epsilon)", "model"
        )
    config[_EPS.get(family.architecture, "rms_norm_eps")] = eps
    for key, name in family.keys.items():
        if metadata.get(key) is not None:
            config[name] = metadata.get(key)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError("the GGUF file has no token_embd.weight [vocabulary, hidden]", "model")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    _read_heads(metadata, config, family)
    _read_biases(header.tensors, config, family)
    _read_windows(metadata, config, family)
    _read_rotary(header, metadata, config, family, parts)
    metadata.refuse_others()
    tokens = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    config |= {f"{name}_token_id": value for name, value in tokens.items() if value is not None}
    config["dtype"] = _dtype(header.tensors.values())
    config["quantization_config"] = {"quant_method": "gguf", "types": _types(header.tensors, family)}
    return config


def _read_heads(metadata: _Metadata, config: dict[str, Any], family: GgufFamily) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size = metadata.get("attention.key_length") or hidden // heads
    if metadata.get("attention.value_length", size) != size:
        raise ConfigError("keys and values of different sizes (attention.value_length) are not supported", "model")
    if (
        metadata.get("attention.key_length_swa", size) != size
        or metadata.get("attention.value_length_swa", size) != size
    ):
        raise ConfigError("heads of layers with windows that have a size of their own are not supported", "model")
    if size * heads != hidden or family.architecture.startswith(("Qwen3", "Gemma", "Glm4", "SeedOss")):
        config["head_dim"] = size
    turning = metadata.get("rope.dimension_count", size)
    metadata.get("rope.dimension_count_swa")
    if turning != size:
        if not family.partial or not 0 < turning < size:
            raise ConfigError(f"rope.dimension_count={shown(turning)} of heads of {size} is not supported", "model")
        config["partial_rotary_factor"] = turning / size
    layers = _LARGE_GEMMA.get(str(metadata._prefix).rstrip("."))
    if layers is not None:
        config["query_pre_attn_scalar"] = hidden // heads if config["num_hidden_layers"] == layers else size


def _read_biases(tensors: Mapping[str, GgufTensor], config: dict[str, Any], family: GgufFamily) -> None:
    has_bias = "blk.0.attn_q.bias" in tensors
    if family.architecture == "Starcoder2ForCausalLM":
        config["use_bias"] = has_bias
    elif family.architecture == "SeedOssForCausalLM":
        config |= {"attention_bias": has_bias, "attention_out_bias": "blk.0.attn_output.bias" in tensors}
    elif family.architecture == "Qwen2MoeForCausalLM":
        config["qkv_bias"] = has_bias
    elif family.architecture not in ("Qwen2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"):
        config["attention_bias"] = has_bias
    if family.architecture == "CohereForCausalLM":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if family.architecture in ("LlamaForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM", "ArceeForCausalLM"):
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors


def _read_windows(metadata: _Metadata, config: dict[str, Any], family: GgufFamily) -> None:
    if not family.windows:
        return
    window, pattern = metadata.get("attention.sliding_window"), metadata.get("attention.sliding_window_pattern")
    if window and window >= config["max_position_embeddings"]:
        window = None
    config["sliding_window"] = window or None
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        config["layer_types"] = [kinds[bool(slides)] for slides in pattern]
        if len(pattern) != config["num_hidden_layers"]:
            raise ConfigError("attention.sliding_window_pattern does not say one value a layer", "model")
    elif pattern is not None and family.architecture == "Gemma3ForCausalLM":
        config["sliding_window_pattern"] = pattern
    elif pattern is not None:
        raise ConfigError(f"attention.sliding_window_pattern={shown(pattern)} is not supported", "model")


def _read_rotary(
    header: GgufHeader, metadata: _Metadata, config: dict[str, Any], family: GgufFamily, parts: Mapping[str, Path]
) -> None:
    trained = config["max_position_embeddings"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(metadata.get("rope.freq_base", 10000.0))}
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor")
    if (older := metadata.get("rope.scale_linear")) not in (None, 1, 1.0):
        kind, factor = "linear", older
    original = metadata.get("rope.scaling.original_context_length")
    by_column = {name: _floats(header, name, parts) for name in SETTINGS if name in header.tensors}
    if by_column:
        # Whatever made them: each pair of columns turns so many times slower.
        short = by_column.get("rope_freqs.weight") or by_column["rope_factors_short.weight"]
        long = by_column.get("rope_freqs.weight") or by_column["rope_factors_long.weight"]
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["attention_factor"] = float(metadata.get("rope.scaling.attn_factor", 1.0))
        rope["original_max_position_embeddings"] = original or trained
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or trained}
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := metadata.get(f"rope.scaling.{theirs}")) is not None:
                rope[ours] = float(value)
    elif kind not in ("none", "longrope", None):
        raise ConfigError(f"rope.scaling.type={shown(kind)} is not supported", "model")
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    if family.architecture == "Gemma3ForCausalLM":
        local = {"rope_type": "default", "rope_theta": float(metadata.get("rope.freq_base_swa", 10000.0))}
        if "rope.freq_base" not in metadata.known or rope["rope_theta"] == 10000.0:
            rope["rope_theta"] = float(metadata.get("rope.freq_base", 1e6))
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    else:
        config["rope_parameters"] = rope


def _floats(header: GgufHeader, name: str, parts: Mapping[str, Path]) -> list[float]:
    """Of a small tensor of float32. Raises ConfigError."""
    tensor = header.tensors[name]
    count = math.prod(tensor.shape)
    if tensor.type.name != "F32" or count > 4096:
        raise ConfigError(
            f"{name} of the GGUF file must be float32, got {tensor.type.name} {list(tensor.shape)}", "model"
        )
    with parts[name].open("rb") as file:
        file.seek(tensor.start)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def _dtype(tensors: Iterable[GgufTensor]) -> str:
    """Of activations: as the largest plain matrices are, else bfloat16."""
    kinds = {tensor.type.name for tensor in tensors if len(tensor.shape) > 1}
    if kinds - set(PLAIN):
        return "bfloat16"
    return "bfloat16" if "BF16" in kinds else "float16" if "F16" in kinds else "float32"


def _types(tensors: Mapping[str, GgufTensor], family: GgufFamily) -> dict[str, str]:
    """The types of matrices that stay in blocks, by module; experts without their number.

    Raises ConfigError for a tensor that nobody knows.
    """
    found = {}
    for name, tensor in tensors.items():
        if name in SETTINGS:
            continue
        known = decoders_name(family, name)
        if known is None:
            raise ConfigError(
                f"the GGUF file has a tensor {name}, which is not known to {family.architecture}", "model"
            )
        if tensor.type.name not in PLAIN and is_matrix(name):
            found[known.removesuffix(".weight").replace(".{}.", ".")] = tensor.type.name
    return found


def generation_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: where answers end, and how they are sampled if the file says."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config: dict[str, Any] = {}
    if ends := list(dict.fromkeys(number for number in ids if isinstance(number, int))):
        config["eos_token_id"] = ends
    if isinstance(bos := metadata.get("tokenizer.ggml.bos_token_id"), int):
        config["bos_token_id"] = bos
    for theirs, ours in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{theirs}")
        if isinstance(value, int | float):
            config[ours] = value
    return config
