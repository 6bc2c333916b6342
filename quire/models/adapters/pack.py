"""Factors of an adapter as a layer keeps them: scaled, and cut to this rank's share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import torch

from quire.distributed.group import Group
from quire.layers.embedding import Embedding
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.low_rank import ExpertFactors, HostFactors
from quire.models.adapters.tensors import Pair

Dense = Callable[[slice], torch.Tensor]
"""Lines of a base matrix, as this rank has them, float32."""
_LINES = 4096  # at a time, where their norms are computed


def of_linear(linear: Linear, pairs: Mapping[int, Pair], dtype: torch.dtype) -> HostFactors:
    """pairs: by part; of the whole matrix."""

    def dense(lines: slice) -> torch.Tensor:
        return linear.matrix.dense(torch.float32, lines)

    return _of_share(linear, pairs, dtype, dense, linear.group)


def _of_share(
    linear: Linear, pairs: Mapping[int, Pair], dtype: torch.dtype, dense: Dense | None, group: Group | None
) -> HostFactors:
    """The same of any matrix that is shared as this one. group: see `_norms`."""
    columns = slice(*linear.columns[:2])
    begins = accumulate((share.room for share in linear.shares), initial=0)
    cut = {}
    for part, (share, begin) in enumerate(zip(linear.shares, begins, strict=False)):
        if part in pairs:
            lines = slice(share.begin, share.end)
            pair = pairs[part]
            magnitude = None if pair.magnitude is None else pair.magnitude[lines]
            cut[part] = begin, Pair(pair.down[:, columns], pair.up[lines], magnitude)
    return _packed(cut, len(linear.parts), linear.local_shape[0], dtype, dense, group)


def of_embedding(embedding: Embedding, pair: Pair, dtype: torch.dtype) -> HostFactors:
    """Its matrix is [hidden, vocabulary]."""

    def dense(lines: slice) -> torch.Tensor:
        return embedding.weight[:, lines].t().float()

    packed = _packed({0: (0, pair)}, 1, len(pair.up), dtype, dense, None)
    return HostFactors(packed.down.t().contiguous(), packed.up, packed.gains)


def of_head(embedding: Embedding, pair: Pair, dtype: torch.dtype) -> HostFactors:
    """Of the head that embeddings are."""
    begin, end, _ = embedding.share
    magnitude = None if pair.magnitude is None else pair.magnitude[begin:end]

    def dense(lines: slice) -> torch.Tensor:
        return embedding.weight[begin:end][lines].float()

    return _packed({0: (0, Pair(pair.down, pair.up[begin:end], magnitude))}, 1, end - begin, dtype, dense, None)


def of_whole(weight: torch.Tensor, pair: Pair, dtype: torch.dtype) -> HostFactors:
    """Of a plain matrix [n, k] that every rank has whole."""

    def dense(lines: slice) -> torch.Tensor:
        return weight[lines].float()

    return _packed({0: (0, pair)}, 1, len(pair.up), dtype, dense, None)


def of_experts(experts: Experts, pairs: Mapping[tuple[int, int], Pair], dtype: torch.dtype) -> ExpertFactors:
    """pairs: by expert and part, of which down is the last: behind gate and up, or up alone."""
    packed: tuple[dict[int, HostFactors], dict[int, HostFactors]] = ({}, {})
    for expert in sorted({expert for expert, _ in pairs}):
        slot = experts.told_slot(expert)
        for number, (linear, first) in enumerate(zip(experts.pair, (0, len(experts.pair[0].parts)), strict=True)):
            numbers = range(first, first + len(linear.parts))
            own = {part - first: pairs[expert, part] for part in numbers if (expert, part) in pairs}

            def dense(lines: slice, number: int = number, slot: int = slot or 0) -> torch.Tensor:
                return experts.dense(number, slot, torch.float32)[lines]

            if own:
                group = linear.group if experts.spread is None else experts.ranks
                told = None if slot is None else dense
                packed[number][expert] = _of_share(linear, own, dtype, told, group)
    return ExpertFactors(*packed)


def _packed(
    pairs: Mapping[int, tuple[int, Pair]],
    parts: int,
    rows: int,
    dtype: torch.dtype,
    dense: Dense | None,
    group: Group | None,
) -> HostFactors:
    """pairs: by part, each with its first row. dense, group: see `_norms`."""
    rank = max(len(pair.down) for _, pair in pairs.values())
    columns = next(iter(pairs.values()))[1].down.shape[1]
    down, up, gains = torch.zeros(parts * rank, columns), torch.zeros(rank, rows), torch.ones(rows)
    for part, (begin, pair) in pairs.items():
        lines = slice(begin, begin + len(pair.up))
        down[part * rank :][: len(pair.down)] = pair.down
        up[: pair.up.shape[1], lines] = pair.up.T
        if pair.magnitude is not None:
            gains[lines] = pair.magnitude / _norms(pair, lines.start, dense, group)
    up *= gains
    has_gains = any(pair.magnitude is not None for _, pair in pairs.values())
    return HostFactors(_kept(down.to(dtype)), _kept(up.to(dtype)), _kept(gains) if has_gains else None)


def _norms(pair: Pair, begin: int, dense: Dense | None, group: Group | None) -> torch.Tensor:
    """Of the lines of W + up @ down, [n], on the host. group: of ranks that have other columns of the same lines, or of
    which one alone has lines at all: then `dense` of the others is None."""
    if dense is None:
        assert group is not None
        total = torch.zeros(len(pair.up), device=group.device)
    else:
        total = torch.cat(list(_squares(pair, begin, dense)))
    return (total if group is None else group.sum(total)).sqrt().cpu()


def _squares(pair: Pair, begin: int, dense: Dense) -> Iterator[torch.Tensor]:
    for first in range(0, len(pair.up), _LINES):
        up = pair.up[first : first + _LINES]
        base = dense(slice(begin + first, begin + first + len(up)))
        yield (base + up.to(base.device) @ pair.down.to(base.device)).square().sum(dim=1)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """In memory from which devices copy by themselves."""
    tensor = tensor.contiguous()
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
