"""SqueezeLLM (Kim et al., 2023): each output has a table of 16 values of its own.

No product knows tables by row, so the numbers are looked up while the model loads, and kept plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.quantization.base import (
    FLOATS,
    OUTPUTS,
    Axis,
    MatrixInfo,
    QuantizationMethod,
    Scheme,
    Source,
    Tensors,
    plain_scheme,
)
from quire.quantization.methods.bits import unpack
from quire.quantization.methods.modules import check_multiples, is_part, names_of, of_all, one_of, refuse_unknown


class SqueezeLLM(QuantizationMethod):
    """Files with sparse parts hold tensors that are not known, and are refused by their names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        refuse_unknown(config, ("wbits", "modules_to_not_convert"), "SqueezeLLM")
        one_of(config, "wbits", (4,), None)
        self._skipped = names_of(config, "modules_to_not_convert")

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> SqueezeLLM:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        plain = plain_scheme(info.dtype)
        if info.role == "vocabulary" or of_all(info, lambda module: is_part(module, self._skipped)):
            return plain
        check_multiples(info, inputs=8)
        sources = (
            Source("qweight", (Axis("inputs", 8), OUTPUTS), (torch.int32,), torch.int32),
            Source("lookup_table", (OUTPUTS, 16), FLOATS, torch.float32),
        )

        def pack(read: Tensors) -> Tensors:
            codes = unpack(read["qweight"].t().contiguous(), 4)
            return {"weight": read["lookup_table"].gather(1, codes.long()).to(info.dtype)}

        return Scheme(plain.format, sources, pack)
