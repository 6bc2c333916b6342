"""MXFP4 (OCP microscaling): plain checkpoints while they load, and gpt-oss, whose experts alone are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.quantization.base import (
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
from quire.quantization.methods.floats import nibbles
from quire.quantization.methods.modules import check_multiples, is_part, names_of, of_all, refuse_unknown
from quire.quantization.methods.online import Online

BLOCK = 32


class Mxfp4(Online):
    format_name = "mxfp4"

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> QuantizationMethod:
        return Mxfp4Experts(config)


class Mxfp4Experts(QuantizationMethod):
    def __init__(self, config: Mapping[str, Any]) -> None:
        refuse_unknown(config, ("modules_to_not_convert", "dequantize"), "MXFP4")
        self._skipped = names_of(config, "modules_to_not_convert")

    def scheme(self, info: MatrixInfo) -> Scheme:
        """Blocks of 16 bytes, low halves first, and the exponent of each."""
        if not of_all(info, lambda module: is_part(module, ["experts"]) and not is_part(module, self._skipped)):
            return plain_scheme(info.dtype)
        check_multiples(info, inputs=BLOCK)
        form = Grouped("e2m1", BLOCK, scale=torch.uint8)
        blocks = Axis("inputs", BLOCK)
        sources = (
            Source("blocks", (OUTPUTS, blocks, BLOCK // 2), (torch.uint8,), torch.uint8),
            Source("scales", (OUTPUTS, blocks), (torch.uint8,), torch.uint8),
        )

        def pack(read: Tensors) -> Tensors:
            return form.packed(nibbles(read["blocks"].flatten(1)), read["scales"])

        return Scheme(form, sources, pack)
