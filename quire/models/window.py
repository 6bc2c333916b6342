"""Sliding windows as Qwen's configs declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError


def uniform_window(config: Mapping[str, Any], num_layers: int) -> int | None:
    """The window of all layers, None if they see everything.

    Raises ConfigError if only some layers have one: their KV would need a second group of blocks.
    """
    if not read(bool, config, "use_sliding_window", False) or config.get("sliding_window") is None:
        return None
    kinds = config.get("layer_types")
    if kinds is None:
        full = read(int, config, "max_window_layers", 28)
    else:
        full = sum(kind != "sliding_attention" for kind in kinds)
    if full >= num_layers:
        return None
    if full > 0:
        raise ConfigError(
            f"config.json: use_sliding_window with {full} of {num_layers} layers without a window is not supported: "
            "all layers must have one, or none",
            "use_sliding_window",
        )
    return read_positive(config, "sliding_window")
