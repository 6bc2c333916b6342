"""bitsandbytes (Dettmers et al., 2022, 2023): integers of 8 bits with a scale an output, or tables of 16 values (NF4,
FP4) with a scale for each 64 numbers, which may themselves be quantized."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire.config.reading import read
from quire.foundation.errors import ConfigError, WeightsError
from quire.kernels.gemm.codes import Kind, table
from quire.quantization.base import (
    INPUTS,
    OUTPUTS,
    Axis,
    MatrixInfo,
    QuantizationMethod,
    Scheme,
    Source,
    Tensors,
    plain_scheme,
)
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

BLOCK, NESTED = 64, 256  # numbers that share a scale, scales that share one
_FACTORS = "weight.nested_absmax"
STATE_BYTES = 1024  # more than any state has
_HISTORY = (
    "bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "_load_in_4bit",
    "_load_in_8bit", "bnb_4bit_target_parameters",
)  # fmt: skip


class BitsAndBytes(QuantizationMethod):
    unused = r"\.weight_format$"

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = (
            "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
            "bnb_4bit_quant_storage", "llm_int8_threshold", "llm_int8_skip_modules", *_HISTORY,
        )  # fmt: skip
        refuse_unknown(config, known, "bitsandbytes")
        self._is_8_bit = read(bool, config, "load_in_8bit", default=False)
        if self._is_8_bit == read(bool, config, "load_in_4bit", default=False):
            raise ConfigError("quantization_config: either load_in_4bit or load_in_8bit must be true", OPTION)
        self._kind: Kind = one_of(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        self._nested = read(bool, config, "bnb_4bit_use_double_quant", default=False)
        one_of(config, "bnb_4bit_quant_storage", ("uint8",), "uint8")
        self._skipped = names_of(config, "llm_int8_skip_modules")

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> BitsAndBytes:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        if info.role == "vocabulary" or of_all(info, lambda module: is_part(module, self._skipped)):
            return plain_scheme(info.dtype)
        return _eight_bits() if self._is_8_bit else self._four_bits(info)

    def _four_bits(self, info: MatrixInfo) -> Scheme:
        """Numbers lie row by row in one line, high halves first: ranks read whole rows and keep whole blocks."""
        k, (first, last) = info.columns, info.inputs
        check_multiples(info, inputs=BLOCK)
        own = own_groups(info, BLOCK)
        sources = [
            Source("weight", (Axis("outputs", 1, k // 2), 1), (torch.uint8,), torch.uint8),
            Source("weight.quant_map", (len(table(self._kind, torch.device("cpu"))),), (torch.float32,), torch.float32),
            Source(
                f"weight.quant_state.bitsandbytes__{self._kind}", (STATE_BYTES,), (torch.uint8,), torch.uint8,
                is_ragged=True,
            ),
        ]  # fmt: skip
        blocks = Axis("outputs", 1, k // BLOCK)
        if not self._nested:
            sources.append(Source("weight.absmax", (blocks,), (torch.float32,), torch.float32))
        else:
            sources += [
                Source("weight.absmax", (blocks,), (torch.uint8,), torch.uint8),
                Source("weight.nested_quant_map", (NESTED,), (torch.float32,), torch.float32),
                *_nested_factors(info),
            ]
        form = Grouped(self._kind, BLOCK, scale=torch.float32)

        def pack(read: Tensors) -> Tensors:
            self._check_table(read["weight.quant_map"], info)
            states = read[f"weight.quant_state.bitsandbytes__{self._kind}"].view(len(info.modules), -1)
            offsets = [_offset(state, info) for state in states]
            pairs = read["weight"].view(-1, k // 2)
            numbers = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1)
            scale = _unnested(read, offsets, info, k) if self._nested else read["weight.absmax"]
            return form.packed(numbers[:, first:last], scale.view(-1, k // BLOCK)[:, own])

        return Scheme(form, tuple(sources), pack)

    def _check_table(self, found: torch.Tensor, info: MatrixInfo) -> None:
        """The table is the one of its name. Raises WeightsError."""
        if not torch.allclose(found.view(-1, 16).cpu(), table(self._kind, torch.device("cpu")), atol=1e-6):
            raise WeightsError(f"quant_map of {', '.join(info.modules)} is not that of {self._kind}", "model")


def _offset(state: torch.Tensor, info: MatrixInfo) -> float:
    """What is added to scales that are quantized, out of the state of a module, JSON and zeros. Raises WeightsError."""
    text = bytes(state.cpu().tolist()).rstrip(b"\0")
    try:
        values = json.loads(text)
        size, nested = values["blocksize"], values.get("nested_blocksize", NESTED)
        offset = float(values.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(
            f"quant_state of {', '.join(info.modules)} is no JSON object with a blocksize", "model"
        ) from None
    if (size, nested) != (BLOCK, NESTED):
        raise WeightsError(
            f"{info.modules[0]} has blocks of {size}, {nested}; {BLOCK}, {NESTED} are supported", "model"
        )
    return offset


def _nested_factors(info: MatrixInfo) -> Iterator[Source]:
    """Of the scales, one for each 256 of a module's: all, since a rank's rows need not end where 256 scales do, nor
    those of a part."""
    for number, rows in enumerate(info.whole):
        if info.first_with(number) == number:
            size = -(-rows * (info.columns // BLOCK) // NESTED)
            yield Source(_FACTORS, (size,), (torch.float32,), torch.float32, part=number)


def _unnested(read: Tensors, offsets: list[float], info: MatrixInfo, k: int) -> torch.Tensor:
    """Scales that are quantized in blocks themselves, each module with a table and an offset of its own."""
    found, a_row = [], k // BLOCK
    scales = read["weight.absmax"].split([rows * a_row for rows in info.parts])
    tables = read["weight.nested_quant_map"].view(len(info.modules), -1)
    for number, (scale, values, offset) in enumerate(zip(scales, tables, offsets, strict=True)):
        factors = read[f"{info.first_with(number)}.{_FACTORS}"]
        by_row = factors.repeat_interleave(NESTED)[: info.whole[number] * a_row].view(-1, a_row)
        found.append(values[scale.int()] * by_row[info.own_lines(number).to(scale.device)].flatten() + offset)
    return torch.cat(found)


def _eight_bits() -> Scheme:
    form = Grouped("int8", 0, scale=torch.float32)
    sources = (
        Source("weight", (OUTPUTS, INPUTS), (torch.int8,), torch.int8),
        Source("SCB", (OUTPUTS,), (torch.float32,), torch.float32),
    )
    return Scheme(form, sources, lambda read: form.packed(read["weight"], read["SCB"][:, None] / 127))
