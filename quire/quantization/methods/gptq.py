"""GPTQ (Frantar et al., 2022): integers of 2, 3, 4 or 8 bits packed along the inputs, scales and zeros by group of
inputs, which may be sorted by importance (`desc_act`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read
from quire.foundation.errors import WeightsError
from quire.kernels.gemm.codes import Kind
from quire.quantization.base import (
    INPUTS,
    OUTPUTS,
    Axis,
    MatrixInfo,
    Pack,
    QuantizationMethod,
    Scheme,
    Source,
    Tensors,
    plain_scheme,
)
from quire.quantization.grouped import Grouped
from quire.quantization.methods.bits import WORD, unpack
from quire.quantization.methods.modules import (
    check_multiples,
    cut_when_packed,
    is_part,
    names_of,
    of_all,
    one_of,
    refuse_unknown,
)
from quire.quantization.methods.settings import KEYS, Dynamic, Settings, check_integers

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class GPTQ(QuantizationMethod):
    """older: zeros are stored less 1."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_integers(config)
        self._settings = Settings.read(config)
        self._head = read(bool, config, "lm_head", default=False)
        self._older = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
        self._dynamic = Dynamic(config.get("dynamic"), self._settings)
        self._skipped = names_of(config, "modules_to_not_convert")
        self._inside = _inside_of_blocks(config)

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> GPTQ:
        if config.get("checkpoint_format") is None and config.get("format") is not None:
            config = {**config, "checkpoint_format": config["format"]}
        known = (
            "lm_head", "dynamic", "checkpoint_format", "format", "modules_to_not_convert",
            "modules_in_block_to_quantize", "block_name_to_quantize", "method", "version", *KEYS,
        )  # fmt: skip
        refuse_unknown(config, known, "GPTQ")
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        settings = None if info.role == "vocabulary" and not self._head else of_all(info, self._of_module)
        return plain_scheme(info.dtype) if settings is None else gptq_scheme(info, settings, older=self._older)

    def _of_module(self, module: str) -> Settings | None:
        is_plain = is_part(module, self._skipped) or (self._inside and not is_part(module, self._inside))
        return self._dynamic.of_module(module, None if is_plain else self._settings)


def _inside_of_blocks(config: Mapping[str, Any]) -> list[str]:
    """The modules that are quantized, as pieces of paths; none named: all."""
    groups = config.get("modules_in_block_to_quantize") or []
    flat = [name for group in groups for name in (group if isinstance(group, list) else [group])]
    return names_of({"modules_in_block_to_quantize": flat}, "modules_in_block_to_quantize")


def gptq_scheme(info: MatrixInfo, settings: Settings, *, older: bool) -> Scheme:
    """Of a matrix whose modules have qweight, qzeros, scales and g_idx."""
    bits, group, sort = settings.bits, settings.group or info.columns, settings.is_sorted
    check_multiples(info, inputs=group, outputs=WORD // math.gcd(WORD, bits))
    inputs = Axis("inputs", WORD, bits) if WORD % bits else Axis("inputs", WORD // bits)
    words = Axis("outputs", WORD, bits) if WORD % bits else Axis("outputs", WORD // bits)
    groups: Axis | int = Axis("inputs", group) if group < info.columns else 1
    sources = (
        Source("qweight", (inputs, OUTPUTS), (torch.int32,), torch.int32),
        Source("qzeros", (groups, words), (torch.int32,), torch.int32),
        Source("scales", (groups, OUTPUTS), FLOATS, torch.float16),
        Source("g_idx", (INPUTS,), (torch.int32, torch.int64), torch.int32, default=-1),
    )
    kind: Kind = "int8" if bits == 8 else "int4"
    zero = None if settings.symmetric else torch.int8 if kind == "int8" else torch.uint8
    parts = info.parts if sort else ()
    form = Grouped(kind, group if group < info.columns else 0, scale=torch.float16, zero=zero, sorted_parts=parts)
    scheme = Scheme(form, sources, _packing(form, settings, info, older=older))
    return cut_when_packed(scheme, info) if sort else scheme


def _packing(form: Grouped, settings: Settings, info: MatrixInfo, *, older: bool) -> Pack:
    bits, sort, modules = settings.bits, settings.is_sorted, info.modules

    def pack(read: Tensors) -> Tensors:
        numbers = unpack(read["qweight"].t().contiguous(), bits)
        scale = read["scales"].t().contiguous()
        order = None
        group = numbers.shape[1] // scale.shape[1]
        index = read["g_idx"].view(len(modules), -1).long()
        if sort:
            order = orders(index, group, modules)
            split = zip(numbers.split(info.parts), order, strict=True)
            numbers = torch.cat([part.index_select(1, one) for part, one in split])
        else:
            _check_unsorted(index, group, modules)
        zero = None if form.zero is None else _zeros(read["qzeros"], bits, older=older)
        numbers, zero = centred(numbers, zero, bits)
        return form.packed(numbers, scale, zero, order=order)

    return pack


def centred(numbers: torch.Tensor, zero: torch.Tensor | None, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """uint8 from 0 on, of which the middle is 0 where there are no zeros → as kinds int4 (up to 4 bits) and int8 have
    them."""
    half = 1 << bits - 1
    if bits > 4:
        return (numbers - half).view(torch.int8), None if zero is None else (zero - half).view(torch.int8)
    return (numbers + (8 - half) if zero is None else numbers), zero


def _zeros(words: torch.Tensor, bits: int, *, older: bool) -> torch.Tensor:
    """[n, groups]. Those of older files were taken 1 from, as whole words: a zero of 0 has borrowed from its
    neighbour."""
    if older:
        ones = torch.tensor(_ones(bits), dtype=torch.int64, device=words.device)
        words = (words.view(len(words), -1, len(ones)) + ones).to(torch.int32).view(words.shape)
    return unpack(words, bits).t().contiguous()


def _ones(bits: int) -> list[int]:
    """Words in which every number is 1."""
    if WORD % bits == 0:
        return [sum(1 << shift for shift in range(0, WORD, bits))]
    stream = sum(1 << shift for shift in range(0, WORD * bits, bits))
    return [stream >> WORD * word & (1 << WORD) - 1 for word in range(bits)]


def orders(index: torch.Tensor, group: int, modules: tuple[str, ...]) -> torch.Tensor:
    """Inputs by their groups, [parts, k]. Raises WeightsError for groups of other sizes."""
    order = index.argsort(dim=1, stable=True)
    regular = torch.arange(index.shape[1], device=index.device) // group
    if not bool((index.gather(1, order) == regular).all()):
        raise WeightsError(f"g_idx of {', '.join(modules)} does not have {group} inputs in each group", "model")
    return order


def _check_unsorted(index: torch.Tensor, group: int, modules: tuple[str, ...]) -> None:
    """A g_idx that is missing (-1) or empty (0) says the same as one in order, from wherever a rank's begins."""
    regular = torch.arange(index.shape[1], device=index.device) // group
    in_order = (index - index[:, :1] == regular).all(1) | (index == index[:, :1]).all(1)
    if not bool(in_order.all()):
        raise WeightsError(
            f"g_idx of {', '.join(modules)} is sorted, but quantization_config says desc_act: false", "model"
        )
