"""What ranks do together in every layer: add up their parts of a product, and collect logits and tokens.

On GPUs that can write each other's memory, messages up to some megabytes go through kernels of ours, which a graph can
hold, and larger ones in pieces, but among three ranks; all others go through the library. Sums are made in the order
of ranks, on every rank from the same numbers: all have the same bits, or they would drift apart.
"""

from __future__ import annotations

from typing import Literal

import torch

from quire.distributed.group import Group
from quire.distributed.peer_memory import PeerMemory
from quire.distributed.sums_under_way import Add
from quire.kernels.summands import Summands

# Among so many at most, where messages take one trip. 16 MiB with the residual: 49 µs, the library's sum and an
# addition 93; among four, in two trips, 75 and 115 (`benchmarks.ranks`).
_RANKS_FOR_PIECES = 2
_FEW_ROWS = 16  # that products norm on their way
_WHOLE_ROWS = 1024  # words of a row that one program adds up and norms sooner than two kernels in pieces


def reduce_add(partial: torch.Tensor | Summands, residual: torch.Tensor, group: Group) -> torch.Tensor:
    """`residual += the sum of all ranks' partial` in place, in float32 and rounded once; both [m, n], contiguous, of
    one dtype. May overwrite `partial`. Of rows whose sums are under way it is only begun."""
    reduce_add_norm(partial, residual, None, group)
    return residual


def reduce_add_norm(
    partial: torch.Tensor | Summands, residual: torch.Tensor, norm: tuple[torch.Tensor, float] | None, group: Group
) -> torch.Tensor | None:
    """`reduce_add`, and what an RMS norm, (weight [n], eps), makes of the sum: [m, n]. None: that is left to whoever
    reads it."""
    peers, rows = group.peers, len(partial)
    if peers is None or not _goes_at_once(residual, group, peers):
        _reduce_add(partial if isinstance(partial, torch.Tensor) else partial.sum(), residual, group)
        return None
    from quire.kernels.triton import across_ranks

    layout = peers.layout
    twice = rows > layout.once_rows
    is_inside = norm is not None and norm[0].dtype == residual.dtype and rows > _FEW_ROWS
    is_inside = is_inside and (twice or layout.words <= _WHOLE_ROWS)
    reduce = across_ranks.reduce_twice if twice else across_ranks.reduce_once
    made = reduce(partial, residual, peers, norm if is_inside else None)
    return made if is_inside else None


def takes_summands(residual: torch.Tensor, group: Group) -> bool:
    """Whether a sum with these rows adds up what a rank has of them on its way; else that takes a pass of its own."""
    return group.peers is not None and _goes_at_once(residual, group, group.peers)


def _goes_at_once(residual: torch.Tensor, group: Group, peers: PeerMemory) -> bool:
    """Whether one launch of ours makes the sum of so many rows."""
    layout, rows = peers.layout, len(residual)
    if group.under_way is not None and group.under_way.holds(residual):
        return False
    most = layout.twice_rows if layout.goes_twice else layout.once_rows
    return 0 < rows <= most and _is_as_wide(residual, peers)


def _reduce_add(partial: torch.Tensor, residual: torch.Tensor, group: Group) -> None:
    """In pieces that are under way, in several messages, or by the library."""
    if group.under_way is not None and group.under_way.holds(residual):
        group.under_way.begin(partial, residual)
        return
    peers = group.peers
    if peers is None or not len(partial) or not _is_as_wide(partial, peers):
        group.reduce_add(partial, residual)
        return
    from quire.kernels.triton import across_ranks

    layout = peers.layout
    if not layout.goes_twice and layout.size > _RANKS_FOR_PIECES:
        group.reduce_add(partial, residual)
        return
    reduce = across_ranks.reduce_twice if layout.goes_twice else across_ranks.reduce_once
    most = layout.twice_rows if layout.goes_twice else layout.once_rows
    for piece, of_residual in zip(partial.split(most), residual.split(most), strict=True):
        reduce(piece, of_residual, peers)


def parts_adder(dtype: torch.dtype, stride: int, rank: int, size: int, device: torch.device) -> Add | None:
    """What adds up numbers of `dtype`, on a GPU; see `MakeAdd`. In the order of ranks, in float32 and rounded once;
    strides and counts are multiples of 16."""
    from quire.kernels.triton import across_ranks

    return across_ranks.parts_adder(dtype, stride, rank, size, device)


def gather_columns(part: torch.Tensor, out: torch.Tensor, group: Group) -> torch.Tensor:
    """out [m, n] = all ranks' part [m, s] side by side, cut off at n, float32; what counts is the first rank's out.
    In memory that ranks share parts may lie in the first columns of their own out.

    Two of them that write to the memory which ranks share must have a `reduce_add` between them.
    """
    if _is_shared(out, group.peers):
        from quire.kernels.triton import across_ranks

        assert group.peers is not None
        return across_ranks.gather_columns(part, out, group.peers)
    return group.gather_columns(part, out)


def from_first(x: torch.Tensor, group: Group, what: Literal["tokens", "drafts"] = "tokens") -> torch.Tensor:
    """x of the first rank, in place; int32 [m], contiguous. Two of the same kind must have a `reduce_add` between them,
    but for copies that share prompts, which write into nobody's memory."""
    peers = group.peers
    if peers is None or group.contexts is not None or len(x) > peers.views[what].shape[1]:
        return group.from_first(x)
    from quire.kernels.triton import across_ranks

    return across_ranks.from_first(x, peers, what)


def _is_as_wide(partial: torch.Tensor, peers: PeerMemory) -> bool:
    """Whether it is as wide as the rows that ranks share memory for."""
    return partial.shape[1] * partial.element_size() == 4 * peers.layout.words


def _is_shared(out: torch.Tensor, peers: PeerMemory | None) -> bool:
    """Whether `out` is the first rows of the logits that ranks share."""
    shared = None if peers is None else peers.logits
    return shared is not None and out.data_ptr() == shared.data_ptr() and out.shape[1] == shared.shape[1]


def reduce_add_reference(partials: list[torch.Tensor], residual: torch.Tensor) -> torch.Tensor:
    """The same from all ranks' parts; `residual` is left as it is."""
    total = residual.float()
    for partial in partials:
        total = total + partial.float()
    return total.to(residual.dtype)
