"""What ranks do together in every layer: add up their parts of a product, and collect logits and tokens.

On GPUs that can write each other's memory, messages up to some megabytes go through kernels of ours, which a graph can
hold; all others through the library. Sums are made in the order of ranks, on every rank from the same numbers: all have
the same bits, or they would drift apart.
"""

from __future__ import annotations

import torch

from quire.distributed.group import Group
from quire.distributed.peer_memory import PeerMemory


def reduce_add(partial: torch.Tensor, residual: torch.Tensor, group: Group) -> torch.Tensor:
    """`residual += the sum of all ranks' partial` in place, in float32 and rounded once; both [m, n], contiguous, of
    one dtype. May overwrite `partial`."""
    peers = group.peers
    if peers is None or len(partial) > peers.layout.many_rows or not len(partial):
        return group.reduce_add(partial, residual)
    from quire.kernels.triton import across_ranks

    reduce = across_ranks.reduce_few if len(partial) <= peers.layout.few_rows else across_ranks.reduce_many
    return reduce(partial, residual, peers)


def gather_columns(part: torch.Tensor, out: torch.Tensor, group: Group) -> torch.Tensor:
    """out [m, n] = all ranks' part [m, s] side by side, cut off at n, float32; what counts is the first rank's out.

    Two of them that write to the memory which ranks share must have a `reduce_add` between them.
    """
    if _is_shared(out, group.peers):
        from quire.kernels.triton import across_ranks

        assert group.peers is not None
        return across_ranks.gather_columns(part, out, group.peers)
    return group.gather_columns(part, out)


def from_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x of the first rank, in place; int32 [m], contiguous. Two of them must have a `reduce_add` between them."""
    peers = group.peers
    if peers is None or len(x) > peers.layout.logit_rows:
        return group.from_first(x)
    from quire.kernels.triton import across_ranks

    return across_ranks.from_first(x, peers)


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
