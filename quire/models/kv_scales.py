"""Scales of keys and values that a checkpoint was calibrated with, for a cache of 8 bits.

What is kept is `k / k_scale` and `v / v_scale`. Here a scale becomes the next power of two, so that taking it into the
weights around the cache (`Attention.keep_scaled`) rounds nothing: an 8-bit float has its precision from its mantissa,
and the scale only has to bring the numbers into its range. Of scales by head the largest counts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch

from quire.foundation.errors import ConfigError, WeightsError
from quire.layers.attention import Attention
from quire.models.base import DecoderStack, Model
from quire.models.checkpoint_files import file_names, layout_of
from quire.models.safetensors_file import MalformedFileError, SafetensorsFile

# As checkpoints call them, behind the layer's number.
_NAME = re.compile(
    r"layers\.(\d+)\.(?:.*\.)?(?:self_attn|attention|mixer|attn)\.(?:.*\.)?"
    r"(?:([kv])_scale|([kv])_proj\.output_scale|(kv)_scale|([kv])_cache\.scale)$"
)
_ZERO = re.compile(r"[kv]_(?:proj\.output_)?zero_point$")
_LARGEST_POWER = 32


def take_in(model: Model, folder: Path, load_format: str) -> int:
    """Take the checkpoint's scales into the weights, which are there; returns how many layers have some.

    Raises ConfigError for a model that cannot, WeightsError for scales that are none.
    """
    found = _read(model, folder, load_format)
    if not found:
        return 0
    layers = list(model.layers) if isinstance(model, DecoderStack) else list[torch.nn.Module]()
    for number, scales in found.items():
        attention = getattr(layers[number], "self_attn", None) if number < len(layers) else None
        if not isinstance(attention, Attention):
            raise ConfigError(
                f"the checkpoint has scales of keys and values in layer {number}, which this model cannot use: set "
                "kv_cache_dtype=auto",
                "kv_cache_dtype",
            )
        attention.keep_scaled(*(_power(scales.get(kind, 1.0), number) for kind in "kv"))
    return len(found)


def _power(scale: float, layer: int) -> float:
    """The next power of two. Raises WeightsError."""
    if not 0 < scale < math.inf:
        raise WeightsError(f"layer {layer}: scales of keys and values must be > 0 and finite, got {scale}", "model")
    power = math.ceil(math.log2(scale) - 1e-6)
    if abs(power) > _LARGEST_POWER:
        raise WeightsError(f"layer {layer}: a scale of keys or values is {scale:g}", "model")
    return 2.0**power


def _read(model: Model, folder: Path, load_format: str) -> dict[int, dict[str, float]]:
    """By layer and kind."""
    layout = layout_of(folder, load_format)
    if layout in ("gguf", "pt", "dummy"):
        return {}
    found: dict[int, dict[str, float]] = defaultdict(dict)
    with ExitStack() as stack:
        try:
            for name in file_names(folder, layout):
                file = stack.enter_context(SafetensorsFile(folder / name))
                for tensor in file.entries:
                    _read_one(model, file, tensor, found)
        except (MalformedFileError, OSError) as error:
            raise WeightsError(f"the weights in {folder} could not be read: {error}", "model") from error
    return dict(found)


def _read_one(model: Model, file: SafetensorsFile, tensor: str, found: dict[int, dict[str, float]]) -> None:
    known = model.file_name(tensor)
    if known is None:
        return
    match, entry = _NAME.search(known), file.entries[tensor]
    if match is None and not _ZERO.search(known):
        return
    data = bytearray(entry.num_bytes)
    file.read_into(memoryview(data), entry.start)
    values = torch.frombuffer(data, dtype=entry.dtype).float()
    if match is None:
        if bool(values.any()):
            raise ConfigError(f"{tensor}: zero points of keys and values are not supported", "kv_cache_dtype")
        return
    kind = next(group for group in match.groups()[1:] if group)
    for one in kind:
        found[int(match[1])][one] = max(float(values.max()), found[int(match[1])].get(one, 0.0))
