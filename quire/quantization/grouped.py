"""Weights of 4 and 8 bits whose columns share scales by groups: integers with or without zeros, small floats, tables.

One format for many conventions: how numbers of every kind are kept is said in `kernels/gemm/codes.py`. Activations are
multiplied as they are. Matrices whose inputs are sorted by group (act-order) have a permutation of these: their groups
are neighbours here.
"""

from __future__ import annotations

import torch

from quire.foundation.errors import ConfigError
from quire.kernels.dispatch import on_triton
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm import codes, grouped_linear
from quire.kernels.gemm.codes import NIBBLES, Codes, Kind
from quire.kernels.gemm.cpu_codes import CpuProduct
from quire.kernels.gemm.fp8_linear import Fp8Rows
from quire.kernels.moe import coded_experts
from quire.kernels.moe.inside import USUAL, Inside
from quire.kernels.moe.routes import Routes
from quire.kernels.summands import Summands
from quire.quantization.base import (
    ALL_ROWS,
    EachExpert,
    ExpertMatrices,
    Matrix,
    Norm,
    Rows,
    Spec,
    Tensors,
    WeightFormat,
    scale_exactly,
)
from quire.quantization.experts import StackedExperts
from quire.quantization.mixed import joined

E4M3 = torch.float8_e4m3fn
LINES = 1024  # that are packed at a time


class GroupedMatrix(Matrix):
    def __init__(self, of: Codes, bias: torch.Tensor | None) -> None:
        self.of, self.bias = of, bias
        self._on_cpu = CpuProduct(of)

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return codes.widened(self.of.of(rows), dtype)

    def linear(
        self,
        x: Rows,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        reader: Matrix | None = None,  # noqa: ARG002 (takes them as they are)
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self._on_cpu.takes(x):
            wanted = out_dtype if out is None else out.dtype
            y = self._on_cpu(x if norm is None else rms_norm(x, *norm), self.bias, wanted)
            return joined([y], gated, residual, out)
        return grouped_linear.linear(
            x, self.of, self.bias, norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out
        )


class SortedMatrix(Matrix):
    """Parts that lie one below the other, each with an order of its own: column j is that of input order[part, j]."""

    def __init__(self, of: Codes, order: torch.Tensor, parts: tuple[int, ...], bias: torch.Tensor | None) -> None:
        self.of, self.order, self.parts, self.bias = of, order, parts, bias

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        sorted_columns = codes.widened(self.of, dtype).split(self.parts)
        wide = torch.cat(
            [part.index_select(1, order.argsort()) for part, order in zip(sorted_columns, self.order, strict=True)]
        )
        return wide[rows]

    def linear(
        self,
        x: Rows,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        reader: Matrix | None = None,  # noqa: ARG002 (takes them as they are)
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if norm is not None:
            x = rms_norm(x, *norm)
        if len(self.parts) == 1 and not gated:
            return grouped_linear.linear(
                x.index_select(1, self.order[0]), self.of, self.bias, residual=residual, out_dtype=out_dtype, out=out
            )
        products, begin = [], 0
        for rows, order in zip(self.parts, self.order, strict=True):
            part = slice(begin, begin + rows)
            bias = None if self.bias is None else self.bias[part]
            products.append(grouped_linear.linear(x.index_select(1, order), self.of.of(part), bias))
            begin += rows
        y = joined(products, gated, residual, out)
        return y if gated or residual is not None or out is not None else y.to(out_dtype or x.dtype)


class CodedExperts(ExpertMatrices):
    """Experts in codes, on a GPU: multiplied as they are where there are kernels for it, else widened before the
    product, those that are hit, all in one pass that waits for nobody. codes: of gate and up [experts, 2n, …], and of
    down [experts, k, …]."""

    def __init__(self, gate_up: Codes, down: Codes, each: EachExpert) -> None:
        self._gate_up, self._down, self._each = gate_up, down, each

    def add(
        self,
        x: torch.Tensor,
        routes: Routes,
        residual: torch.Tensor | None,
        norm: Norm | None = None,
        inside: Inside = USUAL,
        narrow: Fp8Rows | None = None,
    ) -> torch.Tensor:
        if not on_triton(x):
            return self._each.add(x, routes, residual, norm, inside, narrow)
        if coded_experts.takes(x, routes, self._gate_up, self._down):
            return coded_experts.add_experts(x, routes, self._gate_up, self._down, residual, norm, inside)
        experts = len(self._gate_up.codes)
        hit = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
        hit.scatter_(0, torch.where(routes.experts < 0, experts, routes.experts).flatten().long(), 1)
        gate_up, down = (self._widened(of, x.dtype, hit[:experts]) for of in (self._gate_up, self._down))
        return StackedExperts(gate_up, down).add(x, routes, residual, norm, inside, narrow)

    def summands(
        self,
        x: torch.Tensor,
        routes: Routes,
        norm: Norm | None = None,
        inside: Inside = USUAL,
        narrow: Fp8Rows | None = None,
    ) -> torch.Tensor | Summands:
        if on_triton(x) and routes.tiling and coded_experts.takes(x, routes, self._gate_up, self._down):
            return coded_experts.summands(x, routes, self._gate_up, self._down, norm, inside)
        return self.add(x, routes, None, norm, inside, narrow)

    def _widened(self, of: Codes, dtype: torch.dtype, hit: torch.Tensor) -> torch.Tensor:
        flat = [None if tensor is None else tensor.flatten(0, 1) for tensor in (of.zero, of.outer)]
        lines = Codes(of.kind, of.group, of.codes.flatten(0, 1), of.scale.flatten(0, 1), *flat)
        return grouped_linear.widened(lines, dtype, hit).view(*of.codes.shape[:2], -1)


class Grouped(WeightFormat):
    """codes and scale, and zero, outer and order where there are such: see `codes.Codes` and `SortedMatrix`.

    group: columns that share a scale; 0: all of them. scale: its dtype, None for that of activations. zero: its dtype,
    None for none. outer: a factor of each row. sorted_parts: the rows of parts with orders of their own.
    """

    def __init__(
        self,
        kind: Kind,
        group: int,
        *,
        scale: torch.dtype | None = None,
        zero: torch.dtype | None = None,
        outer: bool = False,
        sorted_parts: tuple[int, ...] = (),
    ) -> None:
        self.kind, self.group, self.scale, self.zero, self.outer = kind, group, scale, zero, outer
        self.sorted_parts = sorted_parts

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:
        if columns % 2 and self.kind in NIBBLES:
            raise ConfigError(f"{self.kind} weights come by two, and a matrix has {columns} inputs", "quantization")
        groups = -(-columns // self._group(columns))
        stored = torch.uint8 if self.kind in NIBBLES else torch.int8 if self.kind == "int8" else E4M3
        kept = {
            "codes": Spec((rows, codes.bytes_of(self.kind, columns)), stored),
            "scale": Spec((rows, groups), self.scale or dtype),
        }
        if self.zero is not None:
            kept["zero"] = Spec((rows, groups), self.zero)
        if self.outer:
            kept["outer"] = Spec((rows,), torch.float32)
        if self.sorted_parts:
            kept["order"] = Spec((len(self.sorted_parts), columns), torch.int64)
        return kept

    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """Some lines at a time: what they are on the way takes no more than the matrix itself."""
        n, k = dense.shape
        kept = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=dense.device)
            for name, spec in self.tensors(n, k, dense.dtype).items()
        }
        for first in range(0, n, LINES):
            part = slice(first, first + LINES)
            found = codes.nearest(dense[part], self.kind, self._group(k), kept["scale"].dtype, self.zero, self.outer)
            for name, tensor in self.packed(*found).items():
                kept[name][part] = tensor
        if self.sorted_parts:
            kept["order"][:] = torch.arange(k, device=dense.device)
        return kept

    def packed(
        self,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        outer: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors of codes [n, k], one a number."""
        kept = {"codes": codes.packed(numbers) if self.kind in NIBBLES else numbers, "scale": scale}
        more = {"zero": zero, "outer": outer, "order": order}
        return kept | {name: tensor for name, tensor in more.items() if tensor is not None}

    def scale_rows(self, tensors: Tensors, powers: torch.Tensor) -> None:
        scale = tensors["scale"]
        if self.outer:
            scale_exactly(tensors["outer"], powers)
        elif scale.dtype == torch.uint8:
            moved = scale.int() + torch.log2(powers).int()[:, None]
            if bool(((moved < 1) | (moved > 254)).any()):
                raise ConfigError("scales of keys and values cannot be taken into 8-bit exponents", "kv_cache_dtype")
            scale.copy_(moved.to(torch.uint8))
        else:
            scale_exactly(scale, powers)

    def experts(self, gate_up: Tensors, down: Tensors, down_format: WeightFormat | None = None) -> ExpertMatrices:
        each = EachExpert((self, gate_up), (down_format or self, down))
        other = down_format or self
        if not isinstance(other, Grouped) or self.sorted_parts or other.sorted_parts:
            return each
        return CodedExperts(self._codes(gate_up), other._codes(down), each)

    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> Matrix:
        of = self._codes(tensors)
        if self.sorted_parts:
            return SortedMatrix(of, tensors["order"], self.sorted_parts, bias)
        return GroupedMatrix(of, bias)

    def _codes(self, tensors: Tensors) -> Codes:
        columns = tensors["codes"].shape[-1] * (2 if self.kind in NIBBLES else 1)
        return Codes(
            self.kind, self._group(columns), tensors["codes"], tensors["scale"], tensors.get("zero"),
            tensors.get("outer"),
        )  # fmt: skip

    def _group(self, columns: int) -> int:
        return min(self.group or columns, columns)


class Int4(Grouped):
    """Integers of 4 bits, a scale for each 128 inputs."""

    def __init__(self) -> None:
        super().__init__("int4", 128)


class Int8(Grouped):
    """Integers of 8 bits, a scale an output."""

    def __init__(self) -> None:
        super().__init__("int8", 0, scale=torch.float32)


class Fp8Block(Grouped):
    """8-bit floats, a scale for each 128 inputs of an output."""

    def __init__(self) -> None:
        super().__init__("e4m3", 128, scale=torch.float32)


class MXFP4(Grouped):
    """OCP microscaling: 4-bit floats, a power of two for each 32 inputs."""

    def __init__(self) -> None:
        super().__init__("e2m1", 32, scale=torch.uint8)


class NVFP4(Grouped):
    """4-bit floats, an 8-bit float for each 16 inputs and a factor of the whole."""

    def __init__(self) -> None:
        super().__init__("e2m1", 16, scale=E4M3, outer=True)


class NF4(Grouped):
    """Quantiles of the normal distribution, a scale for each 64 inputs."""

    def __init__(self) -> None:
        super().__init__("nf4", 64, scale=torch.float32)
