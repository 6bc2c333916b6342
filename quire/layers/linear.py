"""Linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from quire.distributed.group import Group
from quire.distributed.topology import ALONE, Share, Topology
from quire.kernels.across_ranks import reduce_add
from quire.layers.norm import RMSNorm
from quire.layers.targets import Staged, Staging, Target, store
from quire.quantization.base import (
    FLOATS,
    OUTPUTS,
    Axis,
    Matrix,
    MatrixInfo,
    Norm,
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
    gated: the rows are [gate | up], and y = silu(x @ gate.T) * (x @ up.T). role: how ranks share it. heads: of each
    part, which are not divided; several ranks keep the same one where there are too few.

    It has no parameters before `allocate`, which the model's builder calls once all layers have their names.
    """

    matrix: Matrix
    group: Group | None = None  # of ranks whose products are added up

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parts: dict[str, int] | None = None,
        gated: bool = False,
        role: Role = "none",
        heads: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = parts or {"": out_features}
        self.gated, self.role, self.has_bias = gated, role, bias
        self._heads = heads or tuple(self.parts.values())
        self.modules_in_checkpoint: tuple[str, ...] = ()

    @classmethod
    def qkv(cls, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> Linear:
        """Query, key and value projections as one: [q heads | k heads | v heads]."""
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        each = (heads, kv_heads, kv_heads)
        return cls(hidden, sum(parts.values()), bias=bias, parts=parts, role="rows", heads=each)

    @classmethod
    def gate_up(cls, hidden: int, intermediate: int, *, bias: bool) -> Linear:
        """The first half of a gated feed-forward layer: [tokens, hidden] → silu(gate) * up [tokens, intermediate]."""
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        return cls(hidden, 2 * intermediate, bias=bias, parts=parts, gated=True, role="rows")

    # -- numbers ------------------------------------------------------------------------------------------------

    def allocate(
        self,
        method: QuantizationMethod,
        modules: tuple[str, ...],
        topology: Topology = ALONE,
        group: Group | None = None,
    ) -> None:
        """Make the parameters, in the default dtype (of activations and bias) and on the default device.

        modules: the full names of `parts` in checkpoints. group: of the ranks that add their products up.
        Raises ConfigError if ranks cannot share it.
        """
        self.modules_in_checkpoint = modules
        self.shares = [self._share(*part, topology) for part in zip(self.parts.values(), self._heads, strict=True)]
        self._columns = Share(0, self.in_features, self.in_features)
        if self.role == "columns":
            self._columns = topology.lines(self.in_features, self.in_features, "input columns")
            self.group = group
        self.dtype = torch.get_default_dtype()
        self._scheme = method.scheme(MatrixInfo(modules, self.out_features, self.in_features, self.role, self.dtype))
        rows, columns = self.local_shape
        kept = {name: _parameter(spec) for name, spec in self._scheme.format.tensors(rows, columns, self.dtype).items()}
        for name, parameter in kept.items():
            self.register_parameter(name, parameter)
        self._kept: dict[str, torch.Tensor] = dict(kept)
        self.bias = _parameter(Spec((rows,), self.dtype)) if self.has_bias else None
        adds_bias = self.role != "columns" or topology.rank == 0  # once in a sum
        self.matrix = self._scheme.format.matrix(self._kept, self.bias if adds_bias else None)

    @property
    def local_shape(self) -> tuple[int, int]:
        """This rank's rows and columns."""
        return sum(share.room for share in self.shares), self._columns.room

    def num_weights(self) -> int:
        """Numbers that the parameters stand for, the bias among them."""
        rows, columns = self.local_shape
        return rows * (columns + self.has_bias)

    def set_dense(self, dense: torch.Tensor) -> None:
        """Keep these numbers, [out, in] of this rank, as the format has them."""
        store(self._kept, self._scheme.format.pack(dense))

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """whole [out, in], or [out] → this rank's share; itself if that is all."""
        if sum(share.end - share.begin for share in self.shares) == len(whole):
            lines = whole
        else:
            begins = accumulate(self.parts.values(), initial=0)
            lines = torch.cat(
                [
                    whole[begin + share.begin : begin + share.end]
                    for begin, share in zip(begins, self.shares, strict=False)
                ]
            )
        missing = self.local_shape[0] - len(lines)
        if missing:
            lines = nn.functional.pad(lines, (0, 0) * (lines.dim() - 1) + (0, missing))
        return lines if lines.dim() == 1 else lines[:, self._columns.begin : self._columns.end]

    def _share(self, rows: int, heads: int, topology: Topology) -> Share:
        if self.role == "rows":
            return topology.lines(rows, heads, "heads" if heads < rows else "output rows")
        return topology.padded(rows) if self.role == "vocabulary" else Share(0, rows, rows)

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
        places = accumulate((share.room for share in self.shares), initial=0)
        parts = zip(self.modules_in_checkpoint, self.parts.values(), self.shares, places, strict=False)
        for number, (module, rows, share, place) in enumerate(parts):
            along = [self._along(axis, rows, share, place) for axis in source.axes]
            shape, part = tuple(length for length, _, _ in along), tuple(lines for _, lines, _ in along)
            first = () if len(self.parts) == 1 or source.has_outputs else (number,)
            at = (*first, *(lines for _, _, lines in along))
            yield Target(f"{module}.{source.name}", shape, into, source.dtypes, part, at)

    def _along(self, axis: Axis | int, rows: int, share: Share, place: int) -> tuple[int, slice, slice]:
        """Of one axis of a part's tensor, `rows` outputs whose `share` is kept from row `place` on: its length, this
        rank's share of it, and the place of that."""
        if isinstance(axis, int):
            return axis, slice(None), slice(None)
        if axis.of == "outputs":
            lines = axis.places(place, place + share.end - share.begin)
            return axis.count(rows), axis.places(share.begin, share.end), lines
        begin, end, _ = self._columns
        return axis.count(self.in_features), axis.places(begin, end), slice(None)

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
        if self.group is not None:
            return self._sum(x, pair, residual)
        after = None if reader is None else reader.matrix
        return self.matrix.linear(x, norm=pair, gated=self.gated, residual=residual, reader=after)

    def _sum(self, x: Rows, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """Of the parts that all ranks have of the product, and the residual."""
        assert self.group is not None
        own = torch.empty_like(residual) if residual is not None and residual.is_cuda else None
        partial = self.matrix.linear(x, norm=norm, out=own)
        assert isinstance(partial, torch.Tensor)
        return reduce_add(partial, torch.zeros_like(partial) if residual is None else residual, self.group)

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
