"""HQQ (Badri and Shaji, 2023): integers of 1, 2, 3, 4 or 8 bits with scales and zeros in floating point.

Groups are along the inputs (axis 1) or across the matrix (axis 0, as older files have it): the latter are no format
here and are kept in plain numbers. Numbers are packed far from each other (the first half of a module's groups beside
the second), so a module's tensors are read whole by every rank, which keeps its share of what is unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.config.reading import read_section
from quire.foundation.errors import ConfigError, WeightsError
from quire.foundation.json_file import shown
from quire.quantization.base import FLOATS, MatrixInfo, QuantizationMethod, Scheme, Source, Tensors, plain_scheme
from quire.quantization.grouped import Grouped
from quire.quantization.methods.modules import (
    OPTION,
    check_multiples,
    is_part,
    names_of,
    of_all,
    one_of,
    own_groups,
    refuse_unknown,
)

BITS = (1, 2, 3, 4, 8)
_NUMBERS = (torch.uint8, torch.int32, torch.int64, torch.bool)
_PER_WORD = 10  # numbers of 3 bits in one of 32


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one module. group 0: all inputs, or outputs."""

    bits: int
    group: int
    axis: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Settings:
        """Raises ConfigError for what cannot be."""
        weights = read_section(config, "weight_quant_params") if "weight_quant_params" in config else config
        known = ("nbits", "group_size", "axis", "channel_wise", "optimize", "round_zero", "view_as_float")
        refuse_unknown(weights, known, "HQQ")
        refuse_unknown(
            {key: value for key, value in config.items() if key not in weights},
            ("weight_quant_params", "offload_meta"),
            "HQQ",
        )
        one_of(weights, "channel_wise", (True,), default=True)
        one_of(weights, "view_as_float", (False,), default=False)
        group = weights.get("group_size")
        if group is not None and (type(group) is not int or group < 8 or group % 8):
            raise ConfigError(f"quantization_config: group_size must be a multiple of 8, got {shown(group)}", OPTION)
        return cls(one_of(weights, "nbits", BITS, 4), group or 0, one_of(weights, "axis", (0, 1), 0))


class HQQ(QuantizationMethod):
    unused = (
        r"\.(packing|unpack_view_dtype|view_as_float|quant_scale|quant_zero|compute_dtype|offload_meta|"
        r"encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero)$"
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        refuse_unknown(config, ("quant_config", "skip_modules", "dynamic_config"), "HQQ")
        given = read_section(config, "quant_config")
        self._all = Settings.read(given) if "weight_quant_params" in given or "nbits" in given else None
        by_name = given if self._all is None else read_section(config, "dynamic_config")
        self._by_name = {name: Settings.read(values) for name, values in by_name.items()}
        self._skipped = names_of(config, "skip_modules")

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> HQQ:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        settings = None if info.role == "vocabulary" else of_all(info, self._of_module)
        if settings is None:
            return plain_scheme(info.dtype)
        return _scheme(info, settings)

    def _of_module(self, module: str) -> Settings | None:
        if is_part(module, self._skipped):
            return None
        named = [values for name, values in self._by_name.items() if is_part(module, [name])]
        return named[0] if named else self._all


def _scheme(info: MatrixInfo, settings: Settings) -> Scheme:
    columns, across = info.columns, settings.axis == 0
    group = settings.group or columns
    if not across:
        check_multiples(info, inputs=group)
    first, last = info.inputs
    kept = settings.group or last - first  # a group of all inputs is one of those that a rank has
    groups = slice(None) if across or not settings.group else own_groups(info, kept)
    form = Grouped("int8" if settings.bits == 8 else "int4", kept, scale=torch.float32, zero=torch.float32)
    sources: list[Source] = []
    for number, rows in enumerate(info.whole):
        size = settings.group or (rows if across else columns)
        if rows * columns % size:
            raise ConfigError(f"quantization_config: {info.modules[number]} is no multiple of groups of {size}", OPTION)
        if info.first_with(number) == number:
            sources += _sources(number, rows * columns // size, size, settings)

    def pack(found: Tensors) -> Tensors:
        parts: list[tuple[torch.Tensor, ...]] = []
        for number, rows in enumerate(info.whole):
            module, own = f"{info.first_with(number)}.", info.own_lines(number)
            one = {key.removeprefix(module): tensor for key, tensor in found.items() if key.startswith(module)}
            _check(one, settings, (rows, columns), info.modules[number])
            count, scale, zero = one["scale"].numel(), one["scale"].flatten(), one["zero"].flatten()
            lines = _unpacked(one["W_q"], settings.bits, rows * columns // count if across else count)
            if across:
                dense = ((lines.float() - zero) * scale).reshape(rows, columns)
                parts.append((dense[own, first:last],))
            else:
                by_row = (each.view(rows, -1)[own, groups] for each in (scale, zero))
                parts.append((lines.view(rows, columns)[own, first:last], *by_row))
        numbers, *rest = (torch.cat(each) for each in zip(*parts, strict=True))
        if across:
            return {"weight": numbers.to(info.dtype)}
        scales, zeros = rest
        if settings.bits == 8:
            return form.packed((numbers ^ 128).view(torch.int8), scales, zeros - 128)
        return form.packed(numbers, scales, zeros)

    return Scheme(plain_scheme(info.dtype).format if across else form, tuple(sources), pack)


def _sources(number: int, groups: int, size: int, settings: Settings) -> list[Source]:
    """Of the part of that number."""
    lines, along = (size, groups) if settings.axis == 0 else (groups, size)
    each = {1: 8, 2: 4, 3: _PER_WORD, 4: 2, 8: 1}[settings.bits]
    stored = torch.int32 if settings.bits == 3 else torch.uint8
    line = (1, groups) if settings.axis == 0 else (groups, 1)
    told = [Source(name, (), _NUMBERS, torch.int32, part=number) for name in ("nbits", "axis", "group_size")]
    return [
        Source("W_q", (-(-lines // each), along), (stored,), stored, part=number),
        Source("scale", line, FLOATS, torch.float32, part=number),
        Source("zero", line, FLOATS, torch.float32, part=number),
        Source("shape", (2,), _NUMBERS, torch.int32, part=number),
        *told[:2],
        Source("group_size", (), _NUMBERS, torch.int32, default=0, part=number),
    ]


def _check(one: Tensors, settings: Settings, shape: tuple[int, int], module: str) -> None:
    """What the tensors say of themselves is what the config does. Raises WeightsError."""
    told = (int(one["nbits"]), int(one["axis"]), tuple(one["shape"].tolist()))
    group = int(one["group_size"])
    if told != (settings.bits, settings.axis, shape) or group not in (0, settings.group, shape[settings.axis]):
        raise WeightsError(
            f"{module} is of {told[0]} bits, axis {told[1]}, groups of {group}, shape {list(told[2])}; the config says "
            f"{settings.bits}, {settings.axis}, {settings.group or 'all'}, {list(shape)}",
            "model",
        )


def _unpacked(words: torch.Tensor, bits: int, lines: int) -> torch.Tensor:
    """uint8 [lines, along], a number each: lines are those of `words` under each other, high bits first."""
    if bits == 8:
        return words
    if bits == 3:
        shifts, most = range(27, -1, -3), 7
    else:
        shifts, most = range(8 - bits, -1, -bits), (1 << bits) - 1
    return torch.cat([((words >> shift) & most).to(torch.uint8) for shift in shifts])[:lines]
