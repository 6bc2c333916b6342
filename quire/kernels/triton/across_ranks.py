"""Sums, logits and tokens across ranks, by writing into each other's memory (`quire/distributed/peer_memory.py`).

Words of sums are their own sign of arrival: the memory they go to holds a word that none of them is, and who waits
polls the data itself; nothing but one trip through the link lies between two ranks. Of four ranks and more, long
messages go twice over the links: each row to the one rank that adds it up, and back. Logits are followed by a flag.

A program waits for its twins on other ranks only. It has sent before it waits, and programs start in the same order
everywhere, so those that run never wait for ones that cannot start. Dependents are let in first thing: while a row is
on its way, the next product's weights are too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.distributed.peer_memory import CHUNK, PeerMemory
from quire.distributed.sums_under_way import Add
from quire.kernels.summands import Summands
from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2
from quire.kernels.triton.launches import launch

Norm = tuple[torch.Tensor, float]
"""Weight [hidden], of the residual's dtype, and eps of an RMS norm."""
_ADDED = 2048  # numbers that one program adds up


@triton.jit
def address(pointer, TYPE: tl.constexpr):
    """Of a part of some rank's memory, read from the table; parts begin at round addresses."""
    return tl.multiple_of(tl.load(pointer).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _addresses(table_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, TYPE: tl.constexpr):
    """Of a part of all ranks' memory, from the next rank's to this one's: not all write to the same one first."""
    found = ()
    for ahead in tl.static_range(1, SIZE + 1):
        found += (address(table_ptr + (RANK + ahead) % SIZE, TYPE),)
    return found


@triton.jit
def _low(word, TYPE: tl.constexpr):
    """The first (or only) number of a 32-bit word, in float32."""
    if TYPE.primitive_bitwidth == 32:
        y = word.to(tl.float32, bitcast=True)
    else:
        y = word.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return y


@triton.jit
def _high(word, TYPE: tl.constexpr):
    if TYPE.primitive_bitwidth == 32:
        y = tl.zeros_like(word).to(tl.float32)
    else:
        y = (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return y


@triton.jit
def _word(low, high, TYPE: tl.constexpr):
    if TYPE.primitive_bitwidth == 32:
        y = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32)
        y = (first & 0xFFFF) | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return y


@triton.jit
def marked(word, use):
    """A word with the number of the use in the upper half."""
    return (word.to(tl.int64) & 0xFFFFFFFF) | (use.to(tl.int64) << 32)


@triton.jit
def arrived(pointers, there, use):
    """The words that another rank has sent, once all of them are here."""
    got = tl.load(pointers, there, 0, volatile=True)
    while tl.max(tl.where(there & ((got >> 32).to(tl.int32) != use), 1, 0)) != 0:
        got = tl.load(pointers, there, 0, volatile=True)
    return got.to(tl.int32)


@triton.jit
def _sent(word):
    """A word as it travels: what would read as nothing at all is another NaN."""
    return tl.where(word == -1, 0x7FFF7FFF, word)


@triton.jit
def _received(pointers, there):
    """The words that ranks have sent, once all of them are here; their places are empty then for a later use."""
    got = tl.load(pointers, there, 0, volatile=True)
    while tl.max(tl.where(got == -1, 1, 0)) != 0:
        got = tl.load(pointers, there, 0, volatile=True)
    tl.store(pointers, tl.zeros_like(got) - 1, there)
    return got


@triton.jit
def _received_by_all(pointers, there):
    """The same of few words, each of which several threads read, and one empties: when all have it."""
    got = tl.load(pointers, there, 0, volatile=True)
    while tl.max(tl.where(got == -1, 1, 0)) != 0:
        got = tl.load(pointers, there, 0, volatile=True)
    tl.debug_barrier()
    tl.store(pointers, tl.zeros_like(got) - 1, there)
    return got


@triton.jit
def _sum(residual, parts, source, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """residual [n] and parts [ranks, n], all of them words, added up in the order of ranks."""
    low, high = _low(residual, TYPE), _high(residual, TYPE)
    for rank in tl.static_range(SIZE):
        word = tl.sum(tl.where(source == rank, parts, 0), axis=0)
        low += _low(word, TYPE)
        high += _high(word, TYPE)
    return _word(low, high, TYPE)


@triton.jit
def _squares(row, TYPE: tl.constexpr):
    """Their sum, of words."""
    low, high = _low(row, TYPE), _high(row, TYPE)
    return tl.sum(low * low + high * high, axis=0)


@triton.jit
def _scaled(row, scale, gain, TYPE: tl.constexpr):
    return _word(_low(row, TYPE) * scale * _low(gain, TYPE), _high(row, TYPE) * scale * _high(gain, TYPE), TYPE)


@triton.jit
def _chosen(experts_ptr, row, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Which of the choices of a row have parts, as `Summands` says; written long before the parts are."""
    place = tl.arange(0, TOP_BLOCK)
    chosen = place < TOP_K
    if not ALL:
        chosen = tl.load(experts_ptr + row * TOP_K + place, chosen, -1) >= 0
    return chosen


@triton.jit
def _own(partial_ptr, row, at, there, chosen, words, TYPE: tl.constexpr, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr):
    """Words of this rank's part of a row, as they travel. TOP_K: of how many it is the sum; 0: it is one already."""
    if TOP_K == 0:
        own = tl.load(partial_ptr + row * words + at, there, 0)
    else:
        lines = (row * TOP_K + tl.arange(0, TOP_BLOCK))[:, None] * words + at[None, :]
        parts = tl.load(partial_ptr + lines, chosen[:, None] & there[None, :], 0)
        own = _word(tl.sum(_low(parts, TYPE), axis=0), tl.sum(_high(parts, TYPE), axis=0), TYPE)
    return _sent(own)


@triton.jit
def _reduce_once_kernel(
    partial_ptr, residual_ptr, peers_ptr, uses_ptr, typed_ptr, experts_ptr, gain_ptr, normed_ptr, words, width, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, ALL: tl.constexpr, NORM: tl.constexpr, PIECES: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every rank sends its part of a row to all, itself too, and adds up what comes.

    NORM: a program has a whole row, of PIECES pieces for those that have one each. MOST: at least as many, a power of
    two."""
    TYPE: tl.constexpr = typed_ptr.dtype.element_ty
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * width + tl.arange(0, BLOCK)
    there = (tl.arange(0, BLOCK) < width) & (at < words)
    source = tl.arange(0, SLOTS)[:, None]
    theirs = _addresses(peers_ptr, RANK, SIZE, tl.int32)
    mine = theirs[SIZE - 1]
    chosen = there
    if TOP_K > 0:
        chosen = _chosen(experts_ptr, row, TOP_K, TOP_BLOCK, ALL)
    if NORM:  # written long ago: read ahead of the wait
        gain = tl.load(gain_ptr + at, there, 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    used = uses_ptr + row * PIECES + piece
    use = tl.load(used)
    turn = (use & 1).to(tl.int64) * SIZE
    part = _own(partial_ptr, row, at, there, chosen, words, TYPE, TOP_K, TOP_BLOCK)
    for peer in tl.static_range(SIZE):
        tl.store(theirs[peer] + ((turn + RANK) * ROWS + row) * words + at, part, there)
    residual = tl.load(residual_ptr + row * words + at, there, 0)
    places = mine + ((turn + source) * ROWS + row) * words + at[None, :]
    parts = _received(places, (source < SIZE) & there[None, :])
    total = _sum(residual, parts, source, TYPE, SIZE)
    tl.store(residual_ptr + row * words + at, total, there)
    if NORM:
        scale = tl.rsqrt(_squares(total, TYPE) / (words * (32 // TYPE.primitive_bitwidth)) + eps)
        tl.store(normed_ptr + row * words + at, _scaled(total, scale, gain, TYPE), there)
        pieces = tl.arange(0, MOST)
        tl.store(used + pieces, tl.zeros_like(pieces) + use + 1, pieces < PIECES)
    else:
        tl.store(used, use + 1)


@triton.jit
def _reduce_twice_kernel(
    partial_ptr, residual_ptr, peers_ptr, uses_ptr, typed_ptr, experts_ptr, gain_ptr, normed_ptr, words, width, eps,
    squares_at, RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, ALL: tl.constexpr, NORM: tl.constexpr, PIECES: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each row has a rank that adds it up and sends the sum to all, itself too. Parts and sums have places of their
    own, for each rank's rows.

    NORM: with each piece goes the sum of its squares, once for every piece, whose program so knows the row's norm.
    squares_at: words from the sums' memory to theirs. Pieces of a row begin one after the other, as they wait for all
    of them. PIECES: as many. MOST: at least as many, a power of two."""
    TYPE: tl.constexpr = typed_ptr.dtype.element_ty
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = piece * width + tl.arange(0, BLOCK)
    there = (tl.arange(0, BLOCK) < width) & (at < words)
    source = tl.arange(0, SLOTS)[:, None]
    theirs = _addresses(peers_ptr, RANK, SIZE, tl.int32)
    mine = theirs[SIZE - 1]
    number, owner = row // SIZE, (row % SIZE).to(tl.int32)
    owners = address(peers_ptr + owner, tl.int32)
    chosen = there
    if TOP_K > 0:
        chosen = _chosen(experts_ptr, row, TOP_K, TOP_BLOCK, ALL)
    if NORM:  # written long ago: read ahead of the wait
        gain = tl.load(gain_ptr + at, there, 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    used = uses_ptr + row * PIECES + piece
    use = tl.load(used)
    part = _own(partial_ptr, row, at, there, chosen, words, TYPE, TOP_K, TOP_BLOCK)
    parts, sums = (use & 1).to(tl.int64) * (2 * SIZE), (use & 1).to(tl.int64) * (2 * SIZE) + SIZE
    tl.store(owners + ((parts + RANK) * ROWS + number) * words + at, part, there)
    place = ((sums + owner) * ROWS + number) * words + at
    if NORM:
        other = tl.arange(0, MOST)
        squares = squares_at + ((use & 1) * (ROWS * SIZE) + row) * PIECES * PIECES
    if owner == RANK:
        residual = tl.load(residual_ptr + row * words + at, there, 0)
        places = mine + ((parts + source) * ROWS + number) * words + at[None, :]
        got = _received(places, (source < SIZE) & there[None, :])
        added = _sent(_sum(residual, got, source, TYPE, SIZE))
        for peer in tl.static_range(SIZE):
            tl.store(theirs[peer] + place, added, there)
        if NORM:
            square = _sent((tl.zeros([MOST], tl.float32) + _squares(added, TYPE)).to(tl.int32, bitcast=True))
            for peer in tl.static_range(SIZE):
                tl.store(theirs[peer] + squares + other * PIECES + piece, square, other < PIECES)
    total = _received(mine + place, there)
    tl.store(residual_ptr + row * words + at, total, there)
    if NORM:
        every = _received_by_all(mine + squares + piece * PIECES + other, other < PIECES).to(tl.float32, bitcast=True)
        scale = tl.rsqrt(tl.sum(every, axis=0) / (words * (32 // TYPE.primitive_bitwidth)) + eps)
        tl.store(normed_ptr + row * words + at, _scaled(total, scale, gain, TYPE), there)
    tl.store(used, use + 1)


@triton.jit
def _from_first_kernel(
    x_ptr, peers_ptr, uses_ptr, count,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    there = at < count
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    use = tl.load(uses_ptr) + 1
    tl.debug_barrier()  # every thread has read it; who only sends meets no other thread before the end
    turn = (use & 1).to(tl.int64) * ROWS
    if RANK == 0:
        x = tl.load(x_ptr + at, there, 0)
        for peer in tl.static_range(1, SIZE):
            theirs = address(peers_ptr + peer, tl.int64)
            tl.store(theirs + turn + at, marked(x, use), there)
    else:
        mine = address(peers_ptr + RANK, tl.int64)
        tl.store(x_ptr + at, arrived(mine + turn + at, there, use), there)
    tl.store(uses_ptr, use)


@triton.jit
def _gather_columns_kernel(
    part_ptr, peers_ptr, flags_ptr, uses_ptr, part_stride, width, stride, columns, chunks,
    RANK: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * chunks + chunk
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    there = (at < width) & (RANK * width + at < columns)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    use = tl.load(uses_ptr + place) + 1
    first = address(peers_ptr, tl.float32)
    flags = address(flags_ptr, tl.int32)
    if RANK > 0 or not IN_PLACE:
        part = tl.load(part_ptr + row * part_stride + at, there, 0.0)
        tl.store(first + row * stride + RANK * width + at, part, there)
    if RANK == 0:
        for source in tl.static_range(1, SIZE):
            while tl.atomic_add(flags + source * PLACES + place, 0, sem="acquire", scope="sys") != use:
                pass
    else:
        tl.debug_barrier()  # every thread has sent
        tl.atomic_xchg(flags + RANK * PLACES + place, use, sem="release", scope="sys")
    tl.store(uses_ptr + place, use)


@triton.jit
def _add_parts_kernel(
    own_ptr, parts_ptr, residual_ptr, numbers, STRIDE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < numbers
    total = tl.load(residual_ptr + at, there, 0).to(tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(own_ptr + at, there, 0).to(tl.float32)
        else:
            total += tl.load(parts_ptr + tl.full((), rank, tl.int64) * STRIDE + at, there, 0).to(tl.float32)
    tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), there)


def parts_adder(dtype: torch.dtype, stride: int, rank: int, size: int, device: torch.device) -> Add | None:
    """See `quire.kernels.across_ranks`. Launched without Triton's look at its arguments, which would take the host
    longer than all else that a sum is. None: as long as launches are rehearsed there is no kernel to be launched."""
    some = torch.empty(16, dtype=dtype, device=device)
    compiled = _add_parts_kernel.warmup(
        some, some, some, 16, STRIDE=stride, RANK=rank, SIZE=size, BLOCK=_ADDED, num_warps=8, grid=(1,)
    )
    if compiled is None:
        return None

    def add(own: int, parts: int, residual: int, count: int, stream: int) -> None:
        grid = (cdiv(count, _ADDED), 1, 1)
        compiled[grid](own, parts, residual, count, stride, rank, size, _ADDED, stream=stream)

    return add


def reduce_once(
    partial: torch.Tensor | Summands, residual: torch.Tensor, peers: PeerMemory, norm: Norm | None = None
) -> torch.Tensor:
    """See `quire.kernels.across_ranks`; at most the layout's `once_rows`. Returns the residual, or with a norm what
    that makes of it."""
    pieces = peers.layout.pieces if norm is None else 1
    return _reduce(_reduce_once_kernel, (len(partial), pieces), partial, residual, peers, norm)


def reduce_twice(
    partial: torch.Tensor | Summands, residual: torch.Tensor, peers: PeerMemory, norm: Norm | None = None
) -> torch.Tensor:
    """The same for at most `twice_rows`, in two trips, of which links carry 2 (N - 1) / N of what a rank has instead of
    N - 1 times as much."""
    grid, squares_at = (peers.layout.pieces, len(partial)), peers.layout.squares_at
    return _reduce(_reduce_twice_kernel, grid, partial, residual, peers, norm, squares_at)


def _reduce(
    kernel: Any,
    grid: tuple[int, int],
    partial: torch.Tensor | Summands,
    residual: torch.Tensor,
    peers: PeerMemory,
    norm: Norm | None,
    *places: int,
) -> torch.Tensor:
    layout, topology, pdl = peers.layout, peers.topology, has_pdl(peers.device)
    trips = "twice" if places else "once"
    own, experts, top_k = partial, None, 0
    if isinstance(partial, Summands):
        own, experts, top_k = partial.parts, partial.experts, partial.parts.shape[1]
    weight, eps = (residual, 0.0) if norm is None else norm
    normed = residual if norm is None else torch.empty_like(residual)
    width = layout.words if norm is not None and not places else -(-layout.words // layout.pieces // 16) * 16
    block = next_power_of_2(width)
    launch(kernel, grid,
        own.view(torch.int32), residual.view(torch.int32), peers.bases[trips], peers.uses[trips], residual,
        residual if experts is None else experts, weight.view(torch.int32), normed.view(torch.int32), layout.words,
        width, eps, *places,
        RANK=topology.rank, SIZE=topology.size, SLOTS=next_power_of_2(topology.size), ROWS=peers.views[trips].shape[-2],
        BLOCK=block, TOP_K=top_k, TOP_BLOCK=next_power_of_2(max(top_k, 1)), ALL=experts is None, NORM=norm is not None,
        PIECES=layout.pieces, MOST=next_power_of_2(layout.pieces), PDL=pdl, launch_pdl=pdl,
        num_warps=min(max(block // 128, 1), 8),
    )  # fmt: skip
    return normed


def from_first(x: torch.Tensor, peers: PeerMemory, what: str = "tokens") -> torch.Tensor:
    """See `quire.kernels.across_ranks`; at most what the layout has room for."""
    rows, pdl = peers.views[what].shape[1], has_pdl(x.device)
    block = next_power_of_2(rows)
    _from_first_kernel[(1,)](
        x, peers.bases[what], peers.uses[what], len(x), RANK=peers.topology.rank, SIZE=peers.topology.size,
        ROWS=rows, BLOCK=block, PDL=pdl, launch_pdl=pdl, num_warps=min(max(block // 256, 8), 32),
    )  # fmt: skip
    return x


def gather_columns(part: torch.Tensor, out: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """See `quire.kernels.across_ranks`; out: the first rows of `peers.logits`, in whose first columns part may lie."""
    layout, topology, pdl = peers.layout, peers.topology, has_pdl(part.device)
    rows, width = part.shape
    _gather_columns_kernel[(-(-width // CHUNK), rows)](
        part, peers.bases["logits"], peers.bases["logits_here"], peers.uses["logits"], part.stride(0), width,
        out.stride(0), layout.vocab, layout.chunks, RANK=topology.rank, SIZE=topology.size,
        PLACES=layout.logit_rows * layout.chunks, IN_PLACE=part.data_ptr() == out.data_ptr(), BLOCK=CHUNK,
        PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return out
