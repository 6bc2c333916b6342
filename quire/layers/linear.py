"""Linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from quire.distributed.group import Group
from quire.distributed.topology import ALONE, Share, Topology
from quire.foundation.errors import ConfigError
from quire.kernels.across_ranks import takes_summands
from quire.kernels.attention.rope import qk_norm_rope_write
from quire.kernels.elementwise.norm import rms_norm
from quire.layers.low_rank import LowRank, Shrunk
from quire.layers.norm import Next, RMSNorm, add_over_ranks
from quire.layers.norm import Norm as NormLayer
from quire.layers.targets import Staged, Staging, Target, store
from quire.quantization.base import (
    FLOATS,
    INPUTS,
    OUTPUTS,
    Axis,
    Matrix,
    MatrixInfo,
    Norm,
    QuantizationMethod,
    Role,
    Rows,
    Scheme,
    Source,
    Spec,
    Tensors,
    plain_source,
    scale_exactly,
    unpacked,
)
from quire.quantization.mixed import scheme_of
from quire.quantization.plain import PlainMatrix

if TYPE_CHECKING:
    from quire.kernels.attention.rope import QkvTarget


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a part's rows lie if checkpoints keep them among others in one tensor. module: whose it is. rows: of it.

    pieces: [begin, end) of the part's rows there, in their order.
    """

    module: str
    rows: int
    pieces: tuple[tuple[int, int], ...]


def stacked(module: str, parts: Mapping[str, int]) -> dict[str, Stored]:
    """One part's rows behind the other's."""
    ends = list(accumulate(parts.values(), initial=0))
    return {part: Stored(module, ends[-1], (lines,)) for part, lines in zip(parts, pairwise(ends), strict=True)}


def by_kv_head(module: str, heads: int, kv_heads: int, head_dim: int) -> dict[str, Stored]:
    """For each key head the query heads that read it, itself and its value head."""
    group = heads // kv_heads
    size = (group + 2) * head_dim
    begins = {"q_proj": (0, group), "k_proj": (group, 1), "v_proj": (group + 1, 1)}
    return {
        part: Stored(
            module,
            kv_heads * size,
            tuple(
                (number * size + first * head_dim, number * size + (first + count) * head_dim)
                for number in range(kv_heads)
            ),
        )
        for part, (first, count) in begins.items()
    }


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in] in whatever format.

    `parts` names the checkpoint's modules, siblings of this one, whose tensors are stacked to make this one's:
    {"q_proj": rows, …} in the order of the rows. Empty: the checkpoint has a module of this one's own name.
    gated: the rows are [gate | up], and y = silu(x @ gate.T) * (x @ up.T). role: how ranks share it. heads: of each
    part, which are not divided; several ranks keep the same one where there are too few. stored: of parts that
    checkpoints have together. transposed: checkpoints have [in, out]. is_plain: kept in plain numbers in whatever
    format others are, for a layer that multiplies by `matrix.dense` itself.

    It has no parameters before `allocate`, which the model's builder calls once all layers have their names.
    """

    matrix: Matrix
    group: Group | None = None  # of ranks whose products are added up
    low_rank: LowRank | None = None  # what adapters add, if there may be any
    next: Next | None = None  # of such a sum, if it goes to the residual stream

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
        stored: Mapping[str, Stored] | None = None,
        transposed: bool = False,
        is_plain: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = parts or {"": out_features}
        self.gated, self.role, self.has_bias = gated, role, bias
        self._stored, self._transposed, self._is_plain = stored or {}, transposed, is_plain
        self.is_read, self.takes_adapters = is_plain, True  # not only multiplied by
        self._heads = heads or tuple(self.parts.values())
        self.modules_in_checkpoint: tuple[str, ...] = ()

    @classmethod
    def qkv(
        cls,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        fused: str = "",
        by_head: bool = False,
        transposed: bool = False,
    ) -> Linear:
        """Query, key and value projections as one: [q heads | k heads | v heads].

        fused: the module that checkpoints have for all three, one after the other, or `by_head`."""
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        each = (heads, kv_heads, kv_heads)
        stored = None
        if fused:
            stored = by_kv_head(fused, heads, kv_heads, head_dim) if by_head else stacked(fused, parts)
        return cls(
            hidden, sum(parts.values()), bias=bias, parts=parts, role="rows", heads=each, stored=stored,
            transposed=transposed,
        )  # fmt: skip

    @classmethod
    def gate_up(
        cls,
        hidden: int,
        intermediate: int,
        *,
        bias: bool,
        fused: str = "",
        silu: bool = True,
        up_first: bool = False,
    ) -> Linear:
        """The first half of a gated feed-forward layer: [tokens, hidden] → silu(gate) * up [tokens, intermediate].

        fused: the module that checkpoints have for both, up before gate if `up_first`. silu: otherwise the result is
        [gate | up]."""
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        stored = stacked(fused, dict(reversed(parts.items())) if up_first else parts) if fused else None
        return cls(hidden, 2 * intermediate, bias=bias, parts=parts, gated=silu, role="rows", stored=stored)

    def part_for(self, topology: Topology, parts: Mapping[str, tuple[int, int]]) -> None:
        """Before `allocate`: ranks share what checkpoints have as one matrix part by part: (rows, heads) of each."""
        if topology.size == 1:
            return
        (module,) = self.sources
        self.parts = {part: rows for part, (rows, _) in parts.items()}
        self._heads = tuple(heads for _, heads in parts.values())
        self._stored = stacked(module, self.parts)

    @property
    def sources(self) -> list[str]:
        """The checkpoint's module of each part, "" for one of this one's own name."""
        return [self._stored[part].module if part in self._stored else part for part in self.parts]

    @property
    def stored_parts(self) -> list[Stored]:
        """Where checkpoints have each part's rows, one of a module of its own too."""
        return [self._stored.get(name) or Stored(name, rows, ((0, rows),)) for name, rows in self.parts.items()]

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
        info = MatrixInfo(modules, self.out_features, self.in_features, self.role, self.dtype, self.part_rows)
        stored, own = self.stored_parts, tuple((share.begin, share.end) for share in self.shares)
        whole, pieces = tuple(part.rows for part in stored), tuple(part.pieces for part in stored)
        info = replace(info, whole=whole, pieces=pieces, own=own, inputs=self._columns[:2])
        scheme = scheme_of(method, info)
        self._scheme = unpacked(scheme, self.dtype) if self._is_plain else scheme
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

    @property
    def part_rows(self) -> tuple[int, ...]:
        """This rank's rows of each part."""
        return tuple(share.room for share in self.shares)

    @property
    def rounds_rows(self) -> bool:
        """Whether it rounds what it multiplies, and norms it on the way."""
        return self.matrix.takes_fp8_rows

    @property
    def scheme(self) -> Scheme:
        """What the method says about it."""
        return self._scheme

    @property
    def columns(self) -> Share:
        """This rank's of the inputs."""
        return self._columns

    @property
    def whole_weights(self) -> int:
        """Numbers of the matrix, on all ranks together; known before `allocate`."""
        return self.out_features * self.in_features

    def num_weights(self) -> int:
        """Numbers that the parameters stand for, the bias among them."""
        rows, columns = self.local_shape
        return rows * (columns + self.has_bias)

    def set_dense(self, dense: torch.Tensor) -> None:
        """Keep these numbers, [out, in] of this rank, as the format has them."""
        store(self._kept, self._scheme.format.pack(dense))

    def as_kept(self, dense: torch.Tensor) -> torch.Tensor:
        """dense [out, in], this rank's of what a checkpoint may have in floating point, in the layer's dtype → what it
        stands for once it is kept; itself if that is no other, or checkpoints have something else."""
        scheme = self._scheme
        if scheme.pack is None or scheme.sources != (plain_source(self.dtype),):
            return dense
        return scheme.format.matrix(scheme.pack({"weight": dense}), None).dense(self.dtype)

    def scale_rows(self, powers: torch.Tensor) -> None:
        """Multiply each of this rank's outputs by a power of two, float32 [rows]. Raises ConfigError if it cannot."""
        self._scheme.format.scale_rows(self._kept, powers)
        if self.bias is not None:
            scale_exactly(self.bias, powers)

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
        yield from self.targets_into(self.modules_in_checkpoint, self._kept)
        if self.bias is not None:
            source = Source("bias", (OUTPUTS,), FLOATS, self.dtype)
            yield from self._targets(self.modules_in_checkpoint, source, self.bias)

    def targets_into(self, modules: tuple[str, ...], kept: Tensors) -> Iterator[Target]:
        """Of a matrix like this one that is kept elsewhere, without its bias. modules: the checkpoint's, as `parts`."""
        scheme, staging = self._scheme, None
        if scheme.pack is not None:
            device = next(iter(kept.values())).device
            specs = {source.key: Spec(self.staged_shape(source), source.kept) for source in scheme.sources}
            defaults = {
                source.key: source.default or 0.0
                for source in scheme.sources
                if source.default is not None or source.is_ragged
            }
            staging = Staging(specs, device, scheme.pack, kept, defaults)
        for source in scheme.sources:
            into = kept[source.key] if staging is None else Staged(staging, source.key)
            yield from self._targets(modules, source, into)

    def _targets(self, modules: tuple[str, ...], source: Source, into: torch.Tensor | Staged) -> Iterator[Target]:
        parts = zip(modules, self.parts.items(), self.shares, strict=True)
        turned = self._transposed and source.axes == (OUTPUTS, INPUTS)
        for number, (module, (part_name, rows), share) in enumerate(parts):
            if source.part not in (None, number):
                continue
            stored = self._stored.get(part_name) or Stored("", rows, ((0, rows),))
            before, name = 0 if source.part is not None else number, f"{module}.{source.name}"
            for lines, line in _cut(stored.pieces, share):
                try:
                    along = [self._along(axis, stored.rows, lines, before, line) for axis in source.axes]
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}", error.field) from None
                first = () if self._is_single(source) else (number,)
                at = (*first, *(lines for _, _, lines in along))
                shape, part = tuple(length for length, _, _ in along), tuple(lines for _, lines, _ in along)
                if turned:
                    shape, part = shape[::-1], part[::-1]
                optional = source.default is not None
                yield Target(name, shape, into, source.dtypes, part, at, turned, optional, source.is_ragged)
                if not source.has_outputs:
                    break

    def _along(
        self, axis: Axis | int, rows: int, lines: tuple[int, int], part: int, line: int
    ) -> tuple[int, slice, slice]:
        """Of one axis of a tensor, `rows` outputs of which those in `lines` are kept from row `line` of a part on: its
        length, this rank's share of it, and the place of that."""
        if isinstance(axis, int):
            return axis, slice(None), slice(None)
        if axis.of == "outputs":
            (begin, end), before = lines, sum(axis.count(room) for room in self.part_rows[:part])
            into = axis.places(line, line + end - begin)
            return axis.count(rows), axis.places(begin, end), slice(before + into.start, before + into.stop)
        begin, end, _ = self._columns
        return axis.count(self.in_features), axis.places(begin, end), slice(None)

    def staged_shape(self, source: Source) -> tuple[int, ...]:
        """Of this rank's part of a source, as it is packed."""
        shape = tuple(self._length(axis, source.part) for axis in source.axes)
        return shape if self._is_single(source) else (len(self.parts), *shape)

    def _is_single(self, source: Source) -> bool:
        """Whether it is kept without a dimension that counts parts."""
        return len(self.parts) == 1 or source.has_outputs or source.part is not None

    def inner_axes(self, source: Source) -> tuple[tuple[int, ...], tuple[slice, ...]]:
        """All axes of a source but the first: how long they are in a checkpoint, and this rank's share of them."""
        along = [self._along(axis, self.out_features, (0, self.out_features), 0, 0) for axis in source.axes[1:]]
        return tuple(length for length, _, _ in along), tuple(lines for _, lines, _ in along)

    def _length(self, axis: Axis | int, part: int | None) -> int:
        """Of a staged tensor: of all parts, or one."""
        if isinstance(axis, int):
            return axis
        if axis.of == "inputs":
            return axis.count(self._columns.room)
        rooms = self.part_rows if part is None else self.part_rows[part : part + 1]
        return sum(axis.count(room) for room in rooms)

    # -- products -----------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Rows | Shrunk,
        norm: NormLayer | None = None,
        residual: torch.Tensor | None = None,
        reader: Linear | None = None,
    ) -> Rows | Shrunk:
        """norm: what x goes through first. residual: the result is added to it in place, and it is returned.

        reader: the one layer that the result goes to, and which it may be rounded for; without, it is a tensor."""
        if self.low_rank is not None and self.low_rank.is_active:
            if self.group is None:
                return self._adapted_for(reader, x, norm, residual)
            return add_over_ranks(self._adapted(x, norm), residual, self.group, self.next)
        assert not isinstance(x, Shrunk)
        x, pair = before(x, norm)
        if self.group is not None:
            return self._sum(x, pair, residual)
        after = None if reader is None else reader.matrix
        return self.matrix.linear(x, norm=pair, gated=self.gated, residual=residual, reader=after)

    def partial(self, x: Rows | Shrunk, residual: torch.Tensor) -> torch.Tensor:
        """`residual += ` this rank's part of the product, in place; returns it."""
        if self.low_rank is not None and self.low_rank.is_active:
            return self._adapted(x, None, residual=residual)
        assert not isinstance(x, Shrunk)
        y = self.matrix.linear(x, residual=residual)
        assert isinstance(y, torch.Tensor)
        return y

    def _adapted_for(
        self, reader: Linear | None, x: Rows | Shrunk, norm: NormLayer | None, residual: torch.Tensor | None
    ) -> torch.Tensor | Shrunk:
        if not self.gated or reader is None or reader.low_rank is None:
            return self._adapted(x, norm, residual=residual)
        assert self.low_rank is not None
        return self.low_rank.expand_for(*self._product_and_shrink(x, norm), self.matrix.bias, reader.low_rank)

    def _adapted(
        self,
        x: Rows | Shrunk,
        norm: NormLayer | None,
        *,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This rank's product with what adapters add; gated, if it is, or added to a residual."""
        assert self.low_rank is not None
        both = self._product_and_shrink(x, norm, out_dtype=out_dtype, out=out, residual=residual)
        return self.low_rank.expand(*both, self.matrix.bias, gated=self.gated, residual=residual)

    def _product_and_shrink(
        self,
        x: Rows | Shrunk,
        norm: NormLayer | None,
        *,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's product, which is neither gated nor added yet, and the first half of what adapters add."""
        assert self.low_rank is not None
        matrix = self.matrix
        if isinstance(x, Shrunk):
            x, inner = x
        else:
            x, pair = before(x, norm)
            assert isinstance(x, torch.Tensor)
            if out is None and out_dtype is None and isinstance(matrix, PlainMatrix):
                summed = residual is not None
                both = self.low_rank.product_and_shrink(x, matrix.weight, matrix.bias, pair, summed=summed)
                if both is not None:
                    return both
            x = x if pair is None else rms_norm(x, *pair, early=True)
            inner = self.low_rank.shrink(x)  # first: the product's weights are on their way meanwhile
        if residual is not None and residual.is_cuda:
            out = torch.empty_like(residual)  # products that are added to a residual are cut up like it
        y = matrix.linear(x, out_dtype=out_dtype, out=out)
        assert isinstance(y, torch.Tensor)
        return y, inner

    def _sum(self, x: Rows, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """Of the parts that all ranks have of the product, and the residual."""
        assert self.group is not None
        under_way = self.group.under_way
        if under_way is not None and residual is not None and isinstance(x, torch.Tensor) and under_way.holds(residual):
            for piece, rows in zip(under_way.cut(x), under_way.cut(residual), strict=True):
                partial = self.matrix.linear(piece, norm=norm, out=torch.empty_like(rows))
                assert isinstance(partial, torch.Tensor)
                under_way.begin(partial, rows)
            return residual
        if residual is not None and takes_summands(residual, self.group):
            summands = self.matrix.summands(x, norm)
            if summands is not None:
                return add_over_ranks(summands, residual, self.group, self.next)
        own = torch.empty_like(residual) if residual is not None and residual.is_cuda else None
        partial = self.matrix.linear(x, norm=norm, out=own)
        assert isinstance(partial, torch.Tensor)
        return add_over_ranks(partial, residual, self.group, self.next)

    def wide(self, x: torch.Tensor, norm: NormLayer | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same in float32, as logits are wanted; into `out` if given."""
        if self.low_rank is not None and self.low_rank.is_active:
            return self._adapted(x, norm, out_dtype=torch.float32, out=out)
        rows, pair = before(x, norm)
        y = self.matrix.linear(rows, norm=pair, out_dtype=torch.float32, out=out)
        assert isinstance(y, torch.Tensor)
        return y

    def qkv_rope_write(self, x: torch.Tensor, norm: RMSNorm, place: QkvTarget) -> torch.Tensor:
        """x [tokens, in] → rotated q [tokens, num_heads, head_dim]; k and v go to their slots in the cache."""
        if self.low_rank is not None and self.low_rank.is_active:
            return qk_norm_rope_write(self._adapted(x, norm), *place)
        rows, pair = before(x, norm)
        assert isinstance(rows, torch.Tensor)
        return self.matrix.qkv_rope_write(rows, pair, place)


def before(x: Rows, norm: NormLayer | None) -> tuple[Rows, Norm | None]:
    """What a product gets of a norm before it: an RMS norm it computes itself, if the weight is of the model's type as
    kernels expect; other norms have been."""
    if norm is None:
        return x, None
    assert isinstance(x, torch.Tensor)
    if not isinstance(norm, RMSNorm) or norm.plus_one:
        return norm(x), None
    given = norm.take(x)
    return (x, (norm.weight, norm.eps)) if given is None else (given, None)


def _cut(pieces: tuple[tuple[int, int], ...], share: Share) -> Iterator[tuple[tuple[int, int], int]]:
    """The lines of a stored tensor that are a rank's share of a part, and the part's row that each run of them is."""
    done = 0
    for begin, end in pieces:
        first, last = max(share.begin - done, 0), min(share.end - done, end - begin)
        if first < last or len(pieces) == 1:
            yield (begin + first, begin + last), done + first - share.begin
        done += end - begin


def _parameter(spec: Spec) -> nn.Parameter:
    return nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype), requires_grad=False)
