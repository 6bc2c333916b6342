"""GGUF (ggml): blocks of 2 to 8 bits, of a type for each tensor; what is no matrix is widened while it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.base import OUTPUTS, Axis, MatrixInfo, QuantizationMethod, Scheme, Source, Tensors, plain_scheme
from quire.quantization.blocks import BLOCKS, LIBRARY, SIZES, Decoded, decoded
from quire.quantization.grouped import Grouped
from quire.quantization.methods.modules import OPTION, check_multiples, of_all, of_all_inputs, own_groups

_EXPERT = re.compile(r"\.experts\.\d+\.")
_HALF_SCALES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")


class Gguf(QuantizationMethod):
    """types: of the modules whose matrices stay in blocks (`config/gguf/settings.py` makes it of a file)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        types = config.get("types")
        if not isinstance(types, dict) or any(kind not in SIZES for kind in types.values()):
            raise ConfigError(f"quantization_config: types must be GGUF types by module, got {shown(types)}", OPTION)
        self._types: dict[str, str] = types

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> Gguf:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        own_names = replace(info, spelled={})  # which `types` has, whatever files of other forms call them
        return _scheme(info, of_all(own_names, self._type_of))

    def _type_of(self, module: str) -> str | None:
        kind = self._types.get(_EXPERT.sub(".experts.", module))
        return None if kind in LIBRARY else kind


def _scheme(info: MatrixInfo, kind: str | None) -> Scheme:
    if kind is None:
        return plain_scheme(info.dtype)
    size, layout = SIZES[kind], BLOCKS[kind]
    check_multiples(info, inputs=size.numbers)
    scale = torch.uint8 if layout.kind == "e2m1" else torch.float16 if kind in _HALF_SCALES else torch.float32
    form = Grouped(layout.kind, layout.group, scale=scale, zero=torch.float32 if layout.has_offset else None)
    source = Source("weight", (OUTPUTS, Axis("inputs", size.numbers, size.num_bytes)), (torch.uint8,), torch.uint8)
    own = None
    if any(place % size.numbers for place in info.inputs):  # a rank's inputs are whole groups, but not whole blocks
        own, source = own_groups(info, layout.group), of_all_inputs(source, info)

    def pack(read: Tensors) -> Tensors:
        found = decoded(read["weight"], kind)
        if own is not None:
            found = _cut(found, own, layout.group)
        if found.offset is None:
            return form.packed(found.numbers, found.scale.to(scale))
        return form.packed(*_with_zeros(found.numbers, found.scale, found.offset, scale))

    return Scheme(form, (source,), pack)


def _cut(found: Decoded, own: slice, group: int) -> Decoded:
    """Of all inputs those of the groups `own`."""
    return found._replace(
        numbers=found.numbers[:, own.start * group : own.stop * group].contiguous(),
        scale=found.scale[:, own].contiguous(),
        offset=None if found.offset is None else found.offset[:, own].contiguous(),
    )


def _with_zeros(
    numbers: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`numbers * scale - offset` as `(numbers - zero) * scale`. Where a scale is 0, so are the numbers, and the offset
    takes its place."""
    flat = scale == 0
    by_group = numbers.view(*scale.shape, -1).masked_fill(flat[..., None], 0)
    scale = torch.where(flat, offset, scale).to(dtype)
    zero = torch.where(scale == 0, 0, torch.where(flat, 1, offset / torch.where(scale == 0, 1, scale.float())))
    return by_group.flatten(1), scale, zero
