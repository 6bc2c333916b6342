"""Sliding windows as config.json declares them, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

_KINDS = ("full_attention", "sliding_attention")


def layer_windows(
    config: Mapping[str, Any], num_layers: int, max_positions: int, *, first_layer: int = 0, pattern: int = 0
) -> list[int | None]:
    """Tokens that a query of each layer sees; None: all, which is also what a window of `max_positions` or more is.

    first_layer: with a window, unless `layer_types` says which have one. pattern: every so many'th layer has none.
    Raises ConfigError for what cannot be.
    """
    window = None if config["sliding_window"] is None else read_positive(config, "sliding_window")
    if config["layer_types"] is None and not pattern:
        slides = [window is not None and layer >= first_layer for layer in range(num_layers)]
    else:
        slides = sliding_layers(config, num_layers, pattern)
    if any(slides) and window is None:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, but there is no sliding_window (or use_sliding_window is "
            "off)",
            "layer_types",
        )
    if window is not None and window >= max_positions:
        window = None
    return [window if sliding else None for sliding in slides]


def sliding_layers(config: Mapping[str, Any], num_layers: int, pattern: int) -> list[bool]:
    """Which layers are of the kind that has windows: by `layer_types`, else all but every `pattern`'th."""
    kinds = config["layer_types"]
    if kinds is None:
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return [kind == "sliding_attention" for kind in _check_kinds(kinds, num_layers)]


def switched_windows(config: Mapping[str, Any], num_layers: int, max_positions: int) -> list[int | None]:
    """The same for families with a switch, whose first layers see everything."""
    on = read(bool, config, "use_sliding_window")
    first = read_count(config, "max_window_layers")
    used = config if on else {**config, "sliding_window": None}
    return layer_windows(used, num_layers, max_positions, first_layer=first)


def _check_kinds(kinds: Any, num_layers: int) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(
            f"config.json: layer_types must be a list with an entry for each of "
            f"num_hidden_layers={num_layers}, got {shown(kinds)}",
            "layer_types",
        )
    for kind in kinds:
        if kind not in _KINDS:
            raise ConfigError(
                f"config.json: layer_types may hold {' and '.join(_KINDS)}, got {shown(kind)}", "layer_types"
            )
    return kinds


def turning_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers have rotary positions: 1 in `no_rope_layers`, else all but every so many'th."""
    told = config["no_rope_layers"]
    if told is None:
        interval = read_positive(config, "no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(told, list) or len(told) < layers or any(turn not in (0, 1) for turn in told):
        raise ConfigError(
            f"config.json: no_rope_layers must be a list of 0 and 1 for each of num_hidden_layers={layers}, "
            f"got {shown(told)}",
            "no_rope_layers",
        )
    return [bool(turn) for turn in told]
