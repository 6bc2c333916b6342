"""Plain checkpoints, quantized to nearest while they load."""

from __future__ import annotations

import torch

from quire.quantization.base import (
    FLOATS,
    FORMATS,
    INPUTS,
    OUTPUTS,
    MatrixInfo,
    QuantizationMethod,
    Scheme,
    Source,
    WeightFormat,
    plain_scheme,
)


class Online(QuantizationMethod):
    """Every matrix but the head in one format."""

    format_name: str

    def __init__(self) -> None:
        self._format: WeightFormat = FORMATS.get(self.format_name)()

    def scheme(self, info: MatrixInfo) -> Scheme:
        if info.role == "vocabulary":
            return plain_scheme(info.dtype)
        source = Source("weight", (OUTPUTS, INPUTS), FLOATS, info.dtype)
        return Scheme(self._format, (source,), lambda read: self._format.pack(read["weight"]))

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return self._format.refuses(device, dtype)


class Fp8Block(Online):
    format_name = "fp8_block"


class Int8(Online):
    format_name = "int8"


class Int4(Online):
    format_name = "int4"


class Nvfp4(Online):
    format_name = "nvfp4"


class Nf4(Online):
    format_name = "nf4"
