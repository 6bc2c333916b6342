"""Factors of an adapter as a layer keeps them: scaled, and cut to this rank's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def of_linear(linear: Linear, pairs: Mapping[int, Pair], dtype: torch.dtype, dense: Dense | None = None) -> HostFactors:
    """pairs: by part; of the whole matrix. dense: by default the layer's own."""
    if dense is None:
        matrix = linear.matrix

        def dense(lines: slice) -> torch.Tensor:
            return matrix.dense(torch.float32, lines)

    columns = slice(*linear.columns[:2])
    begins = accumulate((share.room for share in linear.shares), initial=0)
    cut = {}
    for part, (share, begin) in enumerate(zip(linear.shares, begins, strict=False)):
        if part in pairs:
            lines = slice(share.begin, share.end)
            pair = pairs[part]
            magnitude = None if pair.magnitude is None else pair.magnitude[lines]
            cut[part] = begin, Pair(pair.down[:, columns], pair.up[lines], magnitude)
    return _packed(cut, len(linear.parts), linear.local_shape[0], dtype, dense, linear.group)


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


def of_experts(experts: Experts, pairs: Mapping[tuple[int, int], Pair], dtype: torch.dtype) -> ExpertFactors:
    """pairs: by expert and part, of which gate, up and down are 0, 1 and 2."""
    packed: tuple[dict[int, HostFactors], dict[int, HostFactors]] = ({}, {})
    for expert in sorted({expert for expert, _ in pairs}):
        for number, (linear, first) in enumerate(zip(experts.pair, (0, 2), strict=True)):
            own = {part: pairs[expert, first + part] for part in range(2 - number) if (expert, first + part) in pairs}

            def dense(lines: slice, number: int = number, expert: int = expert) -> torch.Tensor:
                return experts.dense(number, expert, torch.float32)[lines]

            if own:
                packed[number][expert] = of_linear(linear, own, dtype, dense)
    return ExpertFactors(*packed)


def _packed(
    pairs: Mapping[int, tuple[int, Pair]], parts: int, rows: int, dtype: torch.dtype, dense: Dense, group: Group | None
) -> HostFactors:
    """pairs: by part, each with its first row. group: of ranks that have other columns of the same lines."""
    rank = max(len(pair.down) for _, pair in pairs.values())
    columns = next(iter(pairs.values()))[1].down.shape[1]
    down, up, gains = torch.zeros(parts * rank, columns), torch.zeros(rows, rank), torch.ones(rows)
    for part, (begin, pair) in pairs.items():
        lines = slice(begin, begin + len(pair.up))
        down[part * rank :][: len(pair.down)] = pair.down
        up[lines, : pair.up.shape[1]] = pair.up
        if pair.magnitude is not None:
            gains[lines] = pair.magnitude / _norms(pair, lines.start, dense, group)
    up *= gains[:, None]
    has_gains = any(pair.magnitude is not None for _, pair in pairs.values())
    return HostFactors(_kept(down.to(dtype)), _kept(up.to(dtype)), _kept(gains) if has_gains else None)


def _norms(pair: Pair, begin: int, dense: Dense, group: Group | None) -> torch.Tensor:
    """Of the lines of W + up @ down, [n], on the host."""
    squares = []
    for first in range(0, len(pair.up), _LINES):
        up = pair.up[first : first + _LINES]
        base = dense(slice(begin + first, begin + first + len(up)))
        squares.append((base + up.to(base.device) @ pair.down.to(base.device)).square().sum(dim=1))
    total = torch.cat(squares)
    return (total if group is None else group.sum(total)).sqrt().cpu()


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """In memory from which devices copy by themselves."""
    tensor = tensor.contiguous()
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
