"""Plain checkpoints, quantized to nearest while they load."""

from __future__ import annotations

import torch

from quire.quantization.base import FORMATS, MatrixInfo, QuantizationMethod, Scheme, WeightFormat, plain_source


class Online(QuantizationMethod):
    """Every matrix in one format, but the head: that has integers of 8 bits with a scale an output, whatever the
    others have. It is a large part of what a step of few rows reads, and nothing comes behind it that its error could
    spread to."""

    format_name: str

    def __init__(self) -> None:
        self._format: WeightFormat = FORMATS.get(self.format_name)()
        self._of_head: WeightFormat = FORMATS.get("int8")()

    def scheme(self, info: MatrixInfo) -> Scheme:
        form = self._of_head if info.role == "vocabulary" else self._format
        return Scheme(form, (plain_source(info.dtype),), lambda read: form.pack(read["weight"]))

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
