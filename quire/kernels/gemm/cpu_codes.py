"""Products with codes on a CPU by its own instructions, where torch has them: integers of 4 bits by group and of 8 bits
by output, with bfloat16 activations, and of 8 bits few rows in float32. For other kinds, types and for many rows there
are the widened numbers.

Scales and zeros of 4 bits are rounded to bfloat16 there, as activations are; a scale an output is multiplied behind
the product, in float32.
"""

from __future__ import annotations

import torch

from quire.kernels.gemm import codes
from quire.kernels.gemm.codes import Codes

MOST_ROWS = 256
"""More are faster with the weight widened once (`benchmarks/quantized/cpu.py`)."""
MOST_WIDE_ROWS = 4
"""The same in float32, in which torch's kernel takes as long for each row."""
_GROUPS = (32, 64, 128, 256)  # that torch knows
_OUTPUTS = 16  # come together there


class CpuProduct:
    """Of one matrix. Codes of 4 bits are packed anew at the first product, beside those there are."""

    def __init__(self, of: Codes) -> None:
        self._of = of
        self._packed: tuple[torch.Tensor, torch.Tensor] | None = None

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it is faster here. x [m, k]."""
        of, most = self._of, {torch.bfloat16: MOST_ROWS, torch.float32: MOST_WIDE_ROWS}.get(x.dtype, 0)
        if x.device.type != "cpu" or not 0 < len(x) <= most or of.outer is not None:
            return False
        if of.kind == "int8":
            return of.zero is None and of.scale.shape[1] == 1
        known = of.kind == "int4" and of.group in _GROUPS and x.dtype == torch.bfloat16
        return known and not of.columns % of.group and not len(of.codes) % _OUTPUTS

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x [m, k] that it takes → [m, n], in x's type unless another is named."""
        y = (self._int8(x) if self._of.kind == "int8" else self._int4(x)).to(out_dtype or x.dtype)
        return y if bias is None else y.add_(bias)

    def _int8(self, x: torch.Tensor) -> torch.Tensor:
        """In float32."""
        ones = torch.ones(len(self._of.codes), dtype=x.dtype)
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self._of.codes, ones)
        return y.float().mul_(self._of.scale[:, 0].float())

    def _int4(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            self._packed = self._pack()
        packed, scales = self._packed
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, self._of.group, scales)
        return y

    def _pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes as torch has them; of each group a scale, and what is added to `(code - 8) * scale`."""
        of = self._of
        numbers = codes.unpacked(of.codes).int()
        scale = of.scale.float()
        offset = torch.zeros_like(scale) if of.zero is None else (8 - of.zero.float()) * scale
        scales = torch.stack([scale, offset], dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1), scales
