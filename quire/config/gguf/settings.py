"""What a GGUF file says of its model, as config.json and generation_config.json would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.config.gguf.families import SETTINGS, gguf_family
from quire.config.gguf.family import GgufFamily, decoders_name, is_matrix
from quire.config.gguf.metadata import SAID_ELSEWHERE, SIZES, Metadata
from quire.config.gguf.rotary import read_rotary
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import PLAIN, GgufHeader, GgufTensor
from quire.foundation.json_file import shown

_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of those whose queries are scaled by hidden size and heads
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def config_of(header: GgufHeader, parts: Mapping[str, Path]) -> dict[str, Any]:
    """config.json of a GGUF file. parts: which of its files each tensor is in.

    Raises ConfigError for a family, a setting or a tensor that is not known.
    """
    family = gguf_family(header.metadata)
    metadata = Metadata(header.metadata, family.neutral, some_without=family.some_attend)
    config: dict[str, Any] = {"architectures": [family.architecture], **family.fixed}
    for key, name in SIZES.items():
        if key in family.idle:
            metadata.by_layer(key)
            continue
        if key == "attention.head_count_kv" and metadata.get(key) is None:
            continue
        config[name] = metadata.number(key)
    eps = next((metadata.get(key) for key in SAID_ELSEWHERE if "epsilon" in key and metadata.get(key)), None)
    if eps is None:
        raise ConfigError(
            "the GGUF file does not say the epsilon of its norms (attention.layer_norm_*epsilon)", "model"
        )
    config[family.eps] = eps
    if family.ahead:
        config["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    for key, name in family.keys.items():
        if metadata.get(key) is not None:
            config[name] = metadata.get(key)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError("the GGUF file has no token_embd.weight [vocabulary, hidden]", "model")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    if not family.latent and "attention.head_count" not in family.idle:
        _read_heads(metadata, config, family)
    _read_biases(header.tensors, config, family)
    _read_windows(metadata, config, family)
    if family.read is not None:
        family.read(metadata, config, header.tensors)
    if family.turns:
        read_rotary(header, metadata, config, family, parts)
    else:
        metadata.pass_over("rope.")
    metadata.refuse_others()
    tokens = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    config |= {f"{name}_token_id": value for name, value in tokens.items() if value is not None}
    config["dtype"] = _dtype(header.tensors.values())
    config["quantization_config"] = {"quant_method": "gguf", "types": _types(header.tensors, family)}
    return config


def _read_heads(metadata: Metadata, config: dict[str, Any], family: GgufFamily) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size = metadata.get("attention.key_length") or hidden // heads
    if metadata.get("attention.value_length", size) != size:
        raise ConfigError("keys and values of different sizes (attention.value_length) are not supported", "model")
    if (
        metadata.get("attention.key_length_swa", size) != size
        or metadata.get("attention.value_length_swa", size) != size
    ):
        raise ConfigError("heads of layers with windows that have a size of their own are not supported", "model")
    if size * heads != hidden or family.sized:
        config["head_dim"] = size
    turning = metadata.get("rope.dimension_count", size)
    metadata.get("rope.dimension_count_swa")
    if family.turns and turning != size and (not family.partial or not 0 < turning < size):
        raise ConfigError(f"rope.dimension_count={shown(turning)} of heads of {size} is not supported", "model")
    if family.partial:
        config["partial_rotary_factor"] = turning / size
    layers = _LARGE_GEMMA.get(metadata.architecture)
    if layers is not None:
        config["query_pre_attn_scalar"] = hidden // heads if config["num_hidden_layers"] == layers else size


def _read_biases(tensors: Mapping[str, GgufTensor], config: dict[str, Any], family: GgufFamily) -> None:
    if family.bias is not None:
        config[family.bias] = any(f"blk.{layer}.attn_q.bias" in tensors for layer in range(config["num_hidden_layers"]))
    if family.mlp_bias:
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if family.architecture == "SeedOssForCausalLM":
        config["attention_out_bias"] = "blk.0.attn_output.bias" in tensors
    if family.architecture == "CohereForCausalLM":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors


def _read_windows(metadata: Metadata, config: dict[str, Any], family: GgufFamily) -> None:
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
