"""Linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from quire.distributed.topology import ALONE, Topology
from quire.layers.norm import RMSNorm
from quire.layers.targets import Staged, Staging, Target, store
from quire.quantization.base import (
    FLOATS,
    OUTPUTS,
    Axis,
    Matrix,
    MatrixInfo,
    QuantizationMethod,
    Role,
    Rows,
    Source,
    Spec,
)

if TYPE_CHECKING:
    from quire.kernels.attention.rope import QkvTarget


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in] in whatever format.

    `parts` names the checkpoint's modules, siblings of this one, whose tensors are stacked to make this one's:
    {"q_proj": rows, …} in the order of the rows. Empty: the checkpoint has a module of this one's own name.
    gated: the rows are [gate | up], and y = silu(x @ gate.T) * (x @ up.T). role: how ranks share it.

    It has no parameters before `allocate`, which the model's builder calls once all layers have their names.
    """

    matrix: Matrix

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parts: dict[str, int] | None = None,
        gated: bool = False,
        role: Role = "none",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = parts or {"": out_features}
        self.gated, self.role, self.has_bias = gated, role, bias
        self.modules_in_checkpoint: tuple[str, ...] = ()

    @classmethod
    def qkv(cls, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> Linear:
        """Query, key and value projections as one: [q heads | k heads | v heads]."""
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        return cls(hidden, sum(parts.values()), bias=bias, parts=parts, role="rows")

    @classmethod
    def gate_up(cls, hidden: int, intermediate: int, *, bias: bool) -> Linear:
        """The first half of a gated feed-forward layer: [tokens, hidden] → silu(gate) * up [tokens, intermediate]."""
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        return cls(hidden, 2 * intermediate, bias=bias, parts=parts, gated=True, role="rows")

    # -- numbers ------------------------------------------------------------------------------------------------

    def allocate(self, method: QuantizationMethod, modules: tuple[str, ...], topology: Topology = ALONE) -> None:
        """Make the parameters, in the default dtype (of activations and bias) and on the default device.

        modules: the full names of `parts` in checkpoints. Raises ConfigError if ranks cannot share it.
        """
        self.modules_in_checkpoint, self._topology = modules, topology
        self.dtype = torch.get_default_dtype()
        self._scheme = method.scheme(MatrixInfo(modules, self.out_features, self.in_features, self.role, self.dtype))
        rows, columns = self.local_shape
        kept = {name: _parameter(spec) for name, spec in self._scheme.format.tensors(rows, columns, self.dtype).items()}
        for name, parameter in kept.items():
            self.register_parameter(name, parameter)
        self._kept: dict[str, torch.Tensor] = dict(kept)
        self.bias = _parameter(Spec((rows,), self.dtype)) if self.has_bias else None
        self.matrix = self._scheme.format.matrix(self._kept, self.bias)

    @property
    def local_shape(self) -> tuple[int, int]:
        """This rank's rows and columns."""
        return sum(self._rows(part) for part in self.parts.values()), self._columns()

    def num_weights(self) -> int:
        """Numbers that the parameters stand for, the bias among them."""
        rows, columns = self.local_shape
        return rows * (columns + self.has_bias)

    def set_dense(self, dense: torch.Tensor) -> None:
        """Keep these numbers, [out, in] of this rank, as the format has them."""
        store(self._kept, self._scheme.format.pack(dense))

    def _rows(self, rows: int) -> int:
        shared = self.role in ("rows", "vocabulary")
        return self._topology.share(rows, "output rows") if shared else rows

    def _columns(self) -> int:
        shared = self.role == "columns"
        return self._topology.share(self.in_features, "input columns") if shared else self.in_features

    # -- loading ------------------------------------------------------------------------------------------------

    def targets(self) -> Iterator[Target]:
        """Of every tensor that a checkpoint has for it."""
        scheme, staging = self._scheme, None
        if scheme.pack is not None:
            device = next(iter(self._kept.values())).device
            specs = {source.name: Spec(self._stacked_shape(source), source.kept) for source in scheme.sources}
            staging = Staging(specs, device, scheme.pack, self._kept)
        for source in scheme.sources:
            into = self._kept[source.name] if staging is None else Staged(staging, source.name)
            yield from self._targets(source, into)
        if self.bias is not None:
            yield from self._targets(Source("bias", (OUTPUTS,), FLOATS, self.dtype), self.bias)

    def _targets(self, source: Source, into: torch.Tensor | Staged) -> Iterator[Target]:
        end = 0
        for number, (module, rows) in enumerate(zip(self.modules_in_checkpoint, self.parts.values(), strict=True)):
            begin, end = end, end + self._rows(rows)
            along = [self._along(axis, rows, begin, end) for axis in source.axes]
            shape, part = tuple(length for length, _, _ in along), tuple(share for _, share, _ in along)
            first = () if len(self.parts) == 1 or source.has_outputs else (number,)
            at = (*first, *(place for _, _, place in along))
            yield Target(f"{module}.{source.name}", shape, into, source.dtypes, part, at)

    def _along(self, axis: Axis | int, rows: int, begin: int, end: int) -> tuple[int, slice, slice]:
        """Of one axis of a part's tensor, `rows` outputs of which rows begin … end here are this rank's share: its
        length, this rank's share of it, and the place of that."""
        if isinstance(axis, int):
            return axis, slice(None), slice(None)
        if axis.of == "outputs":
            share, rank = end - begin, self._topology.rank if end - begin < rows else 0
            return axis.count(rows), axis.places(rank * share, (rank + 1) * share), axis.places(begin, end)
        share = self._columns()
        rank = self._topology.rank if share < self.in_features else 0
        return axis.count(self.in_features), axis.places(rank * share, (rank + 1) * share), slice(None)

    def _stacked_shape(self, source: Source) -> tuple[int, ...]:
        rows, columns = self.local_shape
        lengths = {"outputs": rows, "inputs": columns}
        shape = tuple(axis if isinstance(axis, int) else axis.count(lengths[axis.of]) for axis in source.axes)
        return shape if len(self.parts) == 1 or source.has_outputs else (len(self.parts), *shape)

    # -- products -----------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Rows,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        reader: Linear | None = None,
    ) -> Rows:
        """norm: what x goes through first. residual: the result is added to it in place, and it is returned.

        reader: the one layer that the result goes to, and which it may be rounded for; without, it is a tensor."""
        pair = None if norm is None else (norm.weight, norm.eps)
        after = None if reader is None else reader.matrix
        return self.matrix.linear(x, norm=pair, gated=self.gated, residual=residual, reader=after)

    def wide(self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same in float32, as logits are wanted; into `out` if given."""
        y = self.matrix.linear(x, norm=(norm.weight, norm.eps), out_dtype=torch.float32, out=out)
        assert isinstance(y, torch.Tensor)
        return y

    def qkv_rope_write(self, x: torch.Tensor, norm: RMSNorm, place: QkvTarget) -> torch.Tensor:
        """x [tokens, in] → rotated q [tokens, num_heads, head_dim]; k and v go to their slots in the cache."""
        return self.matrix.qkv_rope_write(x, (norm.weight, norm.eps), place)


def _parameter(spec: Spec) -> nn.Parameter:
    return nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype), requires_grad=False)
