"""How a GGUF file's queries and keys are turned: `rope_parameters` of config.json."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.gguf.families import SETTINGS
from quire.config.gguf.family import GgufFamily
from quire.config.gguf.metadata import Metadata
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufHeader
from quire.foundation.json_file import shown

_BY_KIND = ("Gemma3ForCausalLM", "Gemma3nForCausalLM")
"""Layers with windows turn in their own way."""
_OF_THE_ROTATION = ("partial_rotary_factor", "llama_4_scaling_beta")


def read_rotary(
    header: GgufHeader, metadata: Metadata, config: dict[str, Any], family: GgufFamily, parts: Mapping[str, Path]
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
        stretch = float(metadata.get("rope.scaling.attn_factor", 1.0))
        if family.architecture == "PhimoeForCausalLM":
            rope |= {"short_mscale": stretch, "long_mscale": stretch}
        else:
            rope["attention_factor"] = stretch
        rope["original_max_position_embeddings"] = original or trained
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or trained}
        if family.architecture == "GptOssForCausalLM":
            rope["truncate"] = False
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := metadata.get(f"rope.scaling.{theirs}")) is not None:
                rope[ours] = float(value)
        if family.sharpened and (multiplier := metadata.get("rope.scaling.yarn_log_multiplier")):
            rope["mscale"] = rope["mscale_all_dim"] = round(family.sharpened * float(multiplier), 6)
    elif kind not in ("none", "longrope", None):
        raise ConfigError(f"rope.scaling.type={shown(kind)} is not supported", "model")
    for key in _OF_THE_ROTATION:
        if key in config:
            rope[key] = config.pop(key)
    if family.architecture in _BY_KIND:
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
