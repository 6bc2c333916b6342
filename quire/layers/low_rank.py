"""What adapters add to the layers: for each matrix the factors of those that are on the device, one a slot.

A product finds the adapters of its rows in `ActiveRows`, which the worker fills on the device before each step, as
attention finds its caches: layers that know nothing of adapters need not hand them on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from quire.kernels.low_rank.factors import RANKS_A_STEP, Factors
from quire.kernels.low_rank.grouped import GroupedFactors, add_grouped
from quire.kernels.low_rank.product import expand, expand_gated_and_shrink, shrink
from quire.kernels.low_rank.rows import AdapterRows, adapter_rows
from quire.kernels.low_rank.with_product import linear_and_shrink


class ActiveRows:
    """Whose the rows are that the layers multiply now: one of a model, known to all its layers.

    rows: None: nobody's, and the layers compute as if there were no adapters. with_rare: some of their adapters change
    what few do (experts, what chooses them, keys and values of latent rows), which is in no graph.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.rows: AdapterRows | None = None
        self.with_rare = False

    @contextmanager
    def narrowed(self, places: torch.Tensor | slice) -> Iterator[None]:
        """Some of the rows alone go on. places: int [rows], or a slice."""
        before = self.rows
        if before is not None:
            self.rows = adapter_rows(before.slots[places], self.num_slots)
        try:
            yield
        finally:
            self.rows = before


@dataclass(frozen=True, slots=True)
class HostFactors:
    """One adapter's, of one matrix, as this rank has them; see `Factors`. The rank is that of the largest part."""

    down: torch.Tensor  # [parts * rank, k]; of an embedding [vocabulary, rank]
    up: torch.Tensor  # [rank, n], times scale and gain
    gains: torch.Tensor | None  # float32 [n]

    @property
    def rank(self) -> int:
        return len(self.up)

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.down, self.up, self.gains) if t is not None)


class Shrunk(NamedTuple):
    """Rows, and what the adapters' first factors of the matrix that they go to make of them; see `LowRank.shrink`."""

    rows: torch.Tensor
    inner: torch.Tensor


class LowRank:
    """Of one matrix.

    parts: rows of each of the matrices that it stands for. rank: the largest of any adapter. Tensors are made on the
    default device.
    """

    def __init__(self, parts: list[int], columns: int, rank: int, dtype: torch.dtype, active: ActiveRows) -> None:
        room, slots, rows = -(-rank // RANKS_A_STEP) * RANKS_A_STEP, active.num_slots, sum(parts)
        ends = tuple(accumulate(parts))
        self._active = active
        self.factors = Factors(
            down=torch.zeros(slots, len(parts) * room, columns, dtype=dtype),
            up=torch.zeros(slots, room, rows, dtype=dtype),
            gains=torch.ones(slots, rows, dtype=torch.float32),
            ranks=torch.zeros(slots, 2, dtype=torch.int32),
            edges=torch.tensor([0, *ends], dtype=torch.int32),
            ends=ends,
        )

    @property
    def is_active(self) -> bool:
        return self._active.rows is not None

    def put(self, slot: int, host: HostFactors | None) -> None:
        """An adapter takes a slot. None: it leaves this matrix alone."""
        factors, at = self.factors, slot - 1
        if host is None:
            factors.ranks[at] = 0
            return
        parts, rank, has_gains = len(factors.ends), host.rank, host.gains is not None
        down = factors.down[at].view(parts, factors.room, -1)
        down[:, :rank].copy_(host.down.view(parts, rank, -1), non_blocking=True)
        factors.up[at, :rank].copy_(host.up, non_blocking=True)
        if host.gains is not None:
            factors.gains[at].copy_(host.gains, non_blocking=True)
        factors.ranks[at, 0], factors.ranks[at, 1] = rank, has_gains

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """The first half of what is added to a product of x, see `expand`."""
        assert self._active.rows is not None
        return shrink(x, self._active.rows, self.factors)

    def product_and_shrink(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: tuple[torch.Tensor, float] | None,
        *,
        summed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The product, and this of x, at once; see `kernels.low_rank.with_product.linear_and_shrink`."""
        assert self._active.rows is not None
        return linear_and_shrink(x, weight, bias, norm, self._active.rows, self.factors, summed=summed)

    def expand(
        self,
        y: torch.Tensor,
        inner: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The second half, with the gate or the residual sum behind it; see `kernels.low_rank.product.expand`."""
        assert self._active.rows is not None
        return expand(y, inner, self._active.rows, self.factors, bias, gated=gated, residual=residual)

    def expand_for(
        self, y: torch.Tensor, inner: torch.Tensor, bias: torch.Tensor | None, reader: LowRank
    ) -> torch.Tensor | Shrunk:
        """The second half with the gate, for the one matrix that the result goes to: with its first half, where that is
        faster."""
        assert self._active.rows is not None
        out, its = expand_gated_and_shrink(y, inner, self._active.rows, self.factors, bias, reader.factors)
        return out if its is None else Shrunk(out, its)

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.factors if isinstance(t, torch.Tensor))


class RareLowRank(LowRank):
    """Of a matrix that few adapters change: in no graph, so that steps of all others are as they were."""

    def __init__(self, parts: list[int], columns: int, rank: int, dtype: torch.dtype, active: ActiveRows) -> None:
        super().__init__(parts, columns, rank, dtype, active)
        self._taken: dict[int, HostFactors] = {}  # by slot

    @property
    def is_active(self) -> bool:
        return super().is_active and self._active.with_rare

    def put(self, slot: int, host: HostFactors | None) -> None:
        super().put(slot, host)
        self._taken.pop(slot, None)
        if host is not None:
            self._taken[slot] = host

    def merged(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For whoever reads the matrix [n, k], of one part, instead of multiplying by it: of each adapter that changes
        it the rows that are its own, bool [rows], and the matrix with what it adds."""
        assert self._active.rows is not None
        factors = self.factors
        for slot, host in self._taken.items():
            at, rank = slot - 1, host.rank
            whole = weight.float() if host.gains is None else weight.float() * factors.gains[at, :, None]
            added = factors.up[at, :rank].T.float() @ factors.down[at, :rank].float()
            yield self._active.rows.slots == slot, (whole + added).to(weight.dtype)


class LowRankEmbedding:
    """Of an embedding, whose vectors are the columns of its matrix. It is whole on every rank."""

    def __init__(self, vocab: int, hidden: int, rank: int, dtype: torch.dtype, active: ActiveRows) -> None:
        self._active = active
        self._outer = LowRank([hidden], 0, rank, dtype, active)
        self.lines = torch.zeros(active.num_slots, vocab, self._outer.factors.room, dtype=dtype)

    @property
    def is_active(self) -> bool:
        return self._active.rows is not None

    def put(self, slot: int, host: HostFactors | None) -> None:
        """As LowRank.put."""
        if host is None:
            self._outer.put(slot, None)
            return
        self._outer.put(slot, HostFactors(host.up.new_empty(host.rank, 0), host.up, host.gains))
        self.lines[slot - 1, :, : host.rank].copy_(host.down, non_blocking=True)

    def add(self, y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """To the vectors y [tokens, hidden] of ids, in place; returns it."""
        rows = self._active.rows
        assert rows is not None
        inner = self.lines[(rows.slots - 1).clamp(min=0), ids]
        return expand(y, inner.float()[None], rows, self._outer.factors)

    def num_bytes(self) -> int:
        return self._outer.num_bytes() + self.lines.numel() * self.lines.element_size()


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """One adapter's, of a mixture's experts: by expert, of gate and up (two parts; one, if there is no gate) and of
    down."""

    gate_up: Mapping[int, HostFactors]
    down: Mapping[int, HostFactors]

    def num_bytes(self) -> int:
        return sum(one.num_bytes() for each in (self.gate_up, self.down) for one in each.values())


_Stack = tuple[torch.Tensor, GroupedFactors]
"""Which of its factors are an expert's, int64 [experts], -1: none; and these."""


class LowRankExperts:
    """Of a mixture's experts. These are few adapters' business, and large: a slot has memory while it has factors. Such
    steps run from Python; what an adapter adds to all of its experts is one grouped product.

    experts: how many there are.
    """

    def __init__(self, experts: int, device: torch.device, active: ActiveRows) -> None:
        self._experts, self._device, self._active = experts, device, active
        self._slots: dict[int, tuple[_Stack | None, _Stack | None]] = {}  # of gate and up, and of down

    @property
    def is_active(self) -> bool:
        return self._active.rows is not None and self._active.with_rare

    def put(self, slot: int, host: ExpertFactors | None) -> None:
        """As LowRank.put."""
        self._slots.pop(slot, None)
        if host is not None:
            self._slots[slot] = (self._stacked(host.gate_up), self._stacked(host.down))

    def _stacked(self, each: Mapping[int, HostFactors]) -> _Stack | None:
        """Factors of smaller ranks end in zeros."""
        if not each:
            return None
        first, rank = next(iter(each.values())), max(one.rank for one in each.values())
        parts, columns = len(first.down) // first.rank, first.down.shape[1]
        down = torch.zeros((len(each), parts, rank, columns), dtype=first.down.dtype)
        up = torch.zeros((len(each), first.up.shape[1], rank), dtype=down.dtype)
        gains = torch.ones(up.shape[:2]) if any(one.gains is not None for one in each.values()) else None
        numbers = torch.full((self._experts,), -1)
        for number, (expert, one) in enumerate(each.items()):
            numbers[expert] = number
            down[number, :, : one.rank] = one.down.view(parts, one.rank, columns)
            up[number, :, : one.rank] = one.up.T
            if gains is not None and one.gains is not None:
                gains[number] = one.gains
        there = None if gains is None else gains.to(self._device)
        factors = GroupedFactors(down.flatten(1, 2).to(self._device), up.to(self._device), there, parts)
        return numbers.to(self._device), factors

    def add_gate_up(
        self, experts: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """To y [rows, 2 · inner] = [gate | up] of x, each row's by its own expert (int64 [rows]) and its own token's
        adapter, in place; returns y."""
        return self._add(0, experts, tokens, y, x)

    def add_down(self, experts: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The same of its other matrix."""
        return self._add(1, experts, tokens, y, x)

    def _add(
        self, which: int, experts: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        assert self._active.rows is not None
        own = self._active.rows.slots[tokens]
        for slot, stacks in self._slots.items():
            if (stack := stacks[which]) is not None:
                numbers, factors = stack
                add_grouped(y, x, torch.where(own == slot, numbers[experts], -1), factors)
        return y

    def num_bytes(self) -> int:
        stacks = [stack for pair in self._slots.values() for stack in pair if stack is not None]
        kept = [tensor for _, factors in stacks for tensor in (factors.down, factors.up, factors.gains)]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor is not None)
