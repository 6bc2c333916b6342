"""Sums, logits and tokens across ranks, by writing into each other's memory (`quire/distributed/peer_memory.py`).

Few rows are latency: each 32-bit word travels with the number of the row's use beside it, in one 64-bit store, and who
waits polls the data itself; nothing but one trip through the link lies between two ranks. More rows are bandwidth: the
words travel alone, and a flag a row follows them. Of four ranks and more long messages go twice over the links: each
row to the one rank that adds it up, and back.

A program waits for its twins on other ranks only. It has sent before it waits, and programs start in the same order
everywhere, so those that run never wait for ones that cannot start. Dependents are let in first thing: while a row is
on its way, the next product's weights are too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.distributed.peer_memory import CHUNK, PeerMemory
from quire.kernels.triton.launch import has_pdl, next_power_of_2


@triton.jit
def address(pointer, TYPE: tl.constexpr):
    """Of a part of some rank's memory, read from the table; parts begin at round addresses."""
    return tl.multiple_of(tl.load(pointer).to(tl.pointer_type(TYPE)), 16)


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
def _tell_all(flags_ptr, place, use, RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """That what was stored for the other ranks is there, once every thread has stored: all at once, as each waits until
    its stores have gone."""
    tl.debug_barrier()
    peer = tl.arange(0, SLOTS)
    told = (peer < SIZE) & (peer != RANK)
    flags = tl.load(flags_ptr + peer, told, 0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + place, tl.zeros([SLOTS], tl.int32) + use, told, sem="release", scope="sys")


@triton.jit
def _reduce_few_kernel(
    partial_ptr, residual_ptr, peers_ptr, uses_ptr, typed_ptr, words,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = typed_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < words
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    use = tl.load(uses_ptr + row) + 1
    own = tl.load(partial_ptr + row * words + at, there, 0)
    turn = (use & 1).to(tl.int64) * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = address(peers_ptr + peer, tl.int64)
            tl.store(theirs + ((turn + RANK) * ROWS + row) * words + at, marked(own, use), there)
    before = tl.load(residual_ptr + row * words + at, there, 0)
    low, high = _low(before, TYPE), _high(before, TYPE)
    mine = address(peers_ptr + RANK, tl.int64)
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = own
        else:
            word = arrived(mine + ((turn + source) * ROWS + row) * words + at, there, use)
        low += _low(word, TYPE)
        high += _high(word, TYPE)
    tl.store(residual_ptr + row * words + at, _word(low, high, TYPE), there)
    tl.store(uses_ptr + row, use)


@triton.jit
def _reduce_many_kernel(
    partial_ptr, residual_ptr, peers_ptr, flags_ptr, uses_ptr, typed_ptr, words,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = typed_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < words
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    use = tl.load(uses_ptr + row) + 1
    own = tl.load(partial_ptr + row * words + at, there, 0)
    turn = (use & 1).to(tl.int64) * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = address(peers_ptr + peer, tl.int32)
            tl.store(theirs + ((turn + RANK) * ROWS + row) * words + at, own, there)
    _tell_all(flags_ptr, (turn + RANK) * ROWS + row, use, RANK, SIZE, SLOTS)
    before = tl.load(residual_ptr + row * words + at, there, 0)
    low, high = _low(before, TYPE), _high(before, TYPE)
    mine = address(peers_ptr + RANK, tl.int32)
    my_flags = address(flags_ptr + RANK, tl.int32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = own
        else:
            here = my_flags + (turn + source) * ROWS + row
            while tl.atomic_add(here, 0, sem="acquire", scope="sys") != use:
                pass
            tl.debug_barrier()
            # Not through the processor's own cache, which may remember an earlier use.
            word = tl.load(mine + ((turn + source) * ROWS + row) * words + at, there, 0, cache_modifier=".cg")
        low += _low(word, TYPE)
        high += _high(word, TYPE)
    tl.store(residual_ptr + row * words + at, _word(low, high, TYPE), there)
    tl.store(uses_ptr + row, use)


@triton.jit
def _tell(flags_ptr, peer, place, use):
    """That what was stored for another rank is there, once every thread has stored."""
    tl.debug_barrier()
    tl.atomic_xchg(address(flags_ptr + peer, tl.int32) + place, use, sem="release", scope="sys")


@triton.jit
def _await(flags_ptr, rank, place, use):
    here = address(flags_ptr + rank, tl.int32) + place
    while tl.atomic_add(here, 0, sem="acquire", scope="sys") != use:
        pass
    tl.debug_barrier()


@triton.jit
def _reduce_twice_kernel(
    partial_ptr, residual_ptr, peers_ptr, flags_ptr, uses_ptr, typed_ptr, words,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each row has a rank that adds it up and sends the sum to the others. Parts and sums have places of their own, for
    each rank's rows."""
    TYPE: tl.constexpr = typed_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < words
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    use = tl.load(uses_ptr + row) + 1
    own = tl.load(partial_ptr + row * words + at, there, 0)
    parts = (use & 1).to(tl.int64) * (2 * SIZE)
    sums, number = parts + SIZE, row // SIZE
    owner = (row % SIZE).to(tl.int32)
    mine = address(peers_ptr + RANK, tl.int32)
    if owner == RANK:
        before = tl.load(residual_ptr + row * words + at, there, 0)
        low, high = _low(before, TYPE), _high(before, TYPE)
        for source in tl.static_range(SIZE):
            if source == RANK:
                word = own
            else:
                place = (parts + source) * ROWS + number
                _await(flags_ptr, RANK, place, use)
                word = tl.load(mine + place * words + at, there, 0, cache_modifier=".cg")
            low += _low(word, TYPE)
            high += _high(word, TYPE)
        total = _word(low, high, TYPE)
        place = (sums + RANK) * ROWS + number
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                tl.store(address(peers_ptr + peer, tl.int32) + place * words + at, total, there)
        _tell_all(flags_ptr, place, use, RANK, SIZE, SLOTS)
    else:
        place = (parts + RANK) * ROWS + number
        tl.store(address(peers_ptr + owner, tl.int32) + place * words + at, own, there)
        _tell(flags_ptr, owner, place, use)
        place = (sums + owner) * ROWS + number
        _await(flags_ptr, RANK, place, use)
        total = tl.load(mine + place * words + at, there, 0, cache_modifier=".cg")
    tl.store(residual_ptr + row * words + at, total, there)
    tl.store(uses_ptr + row, use)


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


def reduce_few(partial: torch.Tensor, residual: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """See `quire.kernels.across_ranks`; at most the layout's `few_rows`."""
    layout, topology, pdl = peers.layout, peers.topology, has_pdl(partial.device)
    block = next_power_of_2(layout.words)
    _reduce_few_kernel[(len(partial),)](
        partial.view(torch.int32), residual.view(torch.int32), peers.bases["few"], peers.uses["few"], residual,
        layout.words, RANK=topology.rank, SIZE=topology.size, ROWS=layout.few_rows, BLOCK=block, PDL=pdl,
        num_warps=min(max(block // 128, 1), 16), launch_pdl=pdl,
    )  # fmt: skip
    return residual


def reduce_many(partial: torch.Tensor, residual: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """The same for at most `many_rows`; in two trips, if the layout says so, of which links carry 2 (N - 1) / N of what
    a rank has instead of N - 1 times as much."""
    layout, topology, pdl = peers.layout, peers.topology, has_pdl(partial.device)
    block = next_power_of_2(layout.words)
    kernel = _reduce_twice_kernel if layout.goes_twice else _reduce_many_kernel
    kernel[(len(partial),)](
        partial.view(torch.int32), residual.view(torch.int32), peers.bases["many"], peers.bases["many_here"],
        peers.uses["many"], residual, layout.words, RANK=topology.rank, SIZE=topology.size,
        SLOTS=next_power_of_2(topology.size), ROWS=layout.many_places[1], BLOCK=block, PDL=pdl,
        num_warps=min(max(block // 256, 1), 8), launch_pdl=pdl,
    )  # fmt: skip
    return residual


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
