"""Matrices whose parts (q, k and v; gate and up) are kept in formats of their own: multiplied one by one, put together.

What goes before the products is done once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quire.kernels.elementwise.activation import silu_and_mul
from quire.kernels.elementwise.norm import rms_norm
from quire.quantization.base import (
    ALL_ROWS,
    Matrix,
    MatrixInfo,
    Norm,
    QuantizationMethod,
    Rows,
    Scheme,
    Spec,
    Tensors,
    UnlikeError,
    WeightFormat,
)


def scheme_of(method: QuantizationMethod, info: MatrixInfo) -> Scheme:
    """What a method says about a matrix; about each of its parts, if these are quantized unlike. Raises ConfigError."""
    try:
        return method.scheme(info)
    except UnlikeError:
        return _mixed([method.scheme(part) for part in _parts_of(info)], info.parts)


def _parts_of(info: MatrixInfo) -> Iterator[MatrixInfo]:
    each = zip(info.modules, info.parts, info.whole, info.pieces, info.own, strict=True)
    for module, rows, whole, pieces, own in each:
        every = sum(end - begin for begin, end in pieces)
        yield replace(
            info, modules=(module,), rows=every, parts=(rows,), whole=(whole,), pieces=(pieces,), own=(own,)
        )  # fmt: skip


def _mixed(parts: list[Scheme], rows: tuple[int, ...]) -> Scheme:
    """Of modules that are stored unlike. rows: of each."""
    form = Mixed(tuple((part.format, lines) for part, lines in zip(parts, rows, strict=True)))
    sources = tuple(replace(source, part=number) for number, part in enumerate(parts) for source in part.sources)

    def pack(read: Tensors) -> Tensors:
        packed = []
        for number, part in enumerate(parts):
            own = {source.key: read[f"{number}.{source.name}"] for source in part.sources}
            packed.append(own if part.pack is None else part.pack(own))
        return form.together(packed)

    return Scheme(form, sources, pack)


class MixedMatrix(Matrix):
    """parts: one below the other; rows: of each."""

    def __init__(self, parts: Sequence[Matrix], rows: tuple[int, ...], bias: torch.Tensor | None) -> None:
        self.parts, self.rows, self.bias = parts, rows, bias

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return torch.cat([part.dense(dtype) for part in self.parts])[rows]

    def linear(
        self,
        x: Rows,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        reader: Matrix | None = None,  # noqa: ARG002 (parts may take them unlike)
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        x = x if norm is None else rms_norm(x, *norm)
        products = [part.linear(x, out_dtype=None if gated else out_dtype) for part in self.parts]
        return joined([y for y in products if isinstance(y, torch.Tensor)], gated, residual, out)


def joined(
    products: list[torch.Tensor], gated: bool, residual: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Of the parts of a matrix, with what stands behind its product."""
    y = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    if gated:
        return silu_and_mul(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


class Mixed(WeightFormat):
    """parts: the format of each, and its rows. The tensors are theirs, with the number of the part behind."""

    def __init__(self, parts: tuple[tuple[WeightFormat, int], ...]) -> None:
        self.parts = parts

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:  # noqa: ARG002 (those of parts)
        return {
            f"{name}_{number}": spec
            for number, (form, lines) in enumerate(self.parts)
            for name, spec in form.tensors(lines, columns, dtype).items()
        }

    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        lines = dense.split([rows for _, rows in self.parts])
        packed = [form.pack(part) for (form, _), part in zip(self.parts, lines, strict=True)]
        return self.together(packed)

    def together(self, packed: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """The tensors of all parts."""
        return {f"{name}_{number}": tensor for number, part in enumerate(packed) for name, tensor in part.items()}

    def scale_rows(self, tensors: Tensors, powers: torch.Tensor) -> None:
        for number, ((form, _), own) in enumerate(zip(self.parts, powers.split(self._rows), strict=True)):
            form.scale_rows(self._of(number, tensors), own)

    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> MixedMatrix:
        rows = tuple(self._rows)
        biases = [None] * len(rows) if bias is None else bias.split(self._rows)
        parts = [
            form.matrix(self._of(number, tensors), own)
            for number, ((form, _), own) in enumerate(zip(self.parts, biases, strict=True))
        ]
        return MixedMatrix(parts, rows, bias)

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return next((why for form, _ in self.parts if (why := form.refuses(device, dtype))), None)

    @property
    def _rows(self) -> list[int]:
        return [rows for _, rows in self.parts]

    def _of(self, number: int, tensors: Tensors) -> Tensors:
        end = f"_{number}"
        return {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
