"""Choices of experts, their weights, and their order by expert: a kernel each.

A warp has some tokens and takes the best expert of each, one after another: no threads wait for others. For the order a
program has one expert and looks for it among many choices. Of many tokens, where experts are not too many, a program
has some and sees which of them want the same expert: it says of each choice how many of those come before it, and how
often each expert is wanted; what is left of the order is to add up. Nothing is counted by atomics, so the order is that
of the tokens, whoever comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.moe.routes import Here, Live, Routes, Rule
from quire.kernels.moe.tiling import Tiling, most_tiles
from quire.kernels.moe.triton.plan import plan
from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2
from quire.kernels.triton.launches import launch

_MANY = 2048  # tokens, from which on a warp has several
_AT_ONCE = 2048  # choices, at most, whose order takes one kernel
_FEW = 1024  # choices that a program for the order sees; more, if that makes it all; else four times as many
_COUNTED = 32  # tokens of a program that counts
_COUNTED_FROM = 1024  # tokens, from which on they are counted
_COUNTED_EXPERTS = 128  # at most: with more, such a program has too much at once
_TABLE = 64  # programs whose counts are added up at once
_TILES = 16  # lines of the table of tiles that a program writes


@triton.jit
def _scores(logits, valid, SIGMOID: tl.constexpr):
    """0 for what is no number, so that choices stay choices of experts."""
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        raised = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = raised / tl.sum(raised, axis=1)[:, None]
    return tl.where(valid & (scores == scores), scores, 0.0)


@triton.jit
def _open_groups(
    choice, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, OPEN: tl.constexpr, BEST: tl.constexpr
):
    """Only experts of the best groups; those are judged by their BEST (1 or 2) experts."""
    grouped = tl.reshape(choice, [TOKENS, GROUPS, SIZE])
    best = tl.max(grouped, axis=2)
    if BEST == 2:
        first = tl.argmax(grouped, axis=2)
        others = tl.where(tl.arange(0, SIZE)[None, None, :] == first[:, :, None], float("-inf"), grouped)
        best += tl.max(others, axis=2)
    number = tl.arange(0, GROUPS)[None, :]
    opened = number < 0
    opened = tl.broadcast_to(opened, [TOKENS, GROUPS])
    for _ in tl.static_range(OPEN):
        hit = number == tl.argmax(best, axis=1)[:, None]
        opened = opened | hit
        best = tl.where(hit, float("-inf"), best)
    return tl.reshape(tl.where(opened[:, :, None], grouped, float("-inf")), [TOKENS, GROUPS * SIZE])


@triton.jit
def _ranks(choice, column, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr):
    """Each column's place among the best of its line, or -1; of equals the first column counts."""
    # A score's bits, put so that integers stand in its order; less than any, NaN included, is what is taken.
    bits = choice.to(tl.int32, bitcast=True)
    bits = tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), -(1 << 31) + 1)
    rank = tl.full([TOKENS, COLUMNS], -1, tl.int32)
    for i in tl.static_range(TOP_K):
        best = bits == tl.max(bits, axis=1)[:, None]
        hit = column[None, :] == tl.min(tl.where(best, column[None, :], COLUMNS), axis=1)[:, None]
        rank = tl.where(hit, i, rank)
        bits = tl.where(hit, -(1 << 31), bits)
    return rank


@triton.jit
def _count(wanted, rank, slot, token, earlier_ptr, counts_ptr, SLOTS: tl.constexpr, TOP_K: tl.constexpr):
    """wanted, rank [TOKENS, COLUMNS]: whether a token goes to a column's expert, and its place among its choices; slot:
    the expert's, SLOTS for none."""
    so_far = tl.cumsum(wanted.to(tl.int32), axis=0)
    tl.store(earlier_ptr + token[:, None] * TOP_K + rank, so_far - 1, wanted)
    tl.store(counts_ptr + tl.program_id(0) * SLOTS + slot, tl.sum(wanted.to(tl.int32), axis=0), slot < SLOTS)


@triton.jit
def _here(places_ptr, copies_ptr, expert, is_expert, MOST: tl.constexpr):
    """Of each column's expert: its slot on this rank, -1 for none; which of its copies that is; how many there are."""
    copies = tl.load(copies_ptr + expert, is_expert, 1)
    slot = tl.full(expert.shape, -1, tl.int32)
    number = tl.zeros(expert.shape, tl.int32)
    for i in tl.static_range(MOST):
        found = tl.load(places_ptr + expert * MOST + i, is_expert, -1)
        number = tl.where(found >= 0, i, number)
        slot = tl.maximum(slot, found)
    return slot, number, copies


@triton.jit(do_not_specialize=["num_tokens", "first_live"], do_not_specialize_on_alignment=["slots_ptr"])
def _choose_kernel(
    logits_ptr, bias_ptr, slots_ptr, places_ptr, copies_ptr, loads_ptr, experts_ptr, weights_ptr, earlier_ptr,
    counts_ptr, num_tokens, first_live, scale, least_sum,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, OPEN: tl.constexpr, BEST: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, LIVE: tl.constexpr, SLOTS: tl.constexpr,
    MOST: tl.constexpr, COUNT: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """MOST: copies that an expert may have on the ranks, 0 if all experts are here. COUNT: see `_count`."""
    COLUMNS: tl.constexpr = GROUPS_BLOCK * SIZE_BLOCK
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    expert = column // SIZE_BLOCK * SIZE + column % SIZE_BLOCK
    is_expert = (column % SIZE_BLOCK < SIZE) & (column // SIZE_BLOCK < GROUPS)
    there = token < num_tokens
    live = there
    if LIVE:
        live = there & (tl.load(slots_ptr + token, there, -1) >= first_live)
    slot = expert
    number = expert
    copies = expert
    if MOST:
        slot, number, copies = _here(places_ptr, copies_ptr, expert, is_expert, MOST)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    valid = there[:, None] & is_expert[None, :]
    logits = tl.load(logits_ptr + token[:, None] * EXPERTS + expert[None, :], valid, float("-inf"))
    scores = _scores(logits, valid, SIGMOID)
    choice = scores
    if BIAS:
        choice += tl.load(bias_ptr + expert, is_expert, 0.0)[None, :]
    choice = tl.where(is_expert[None, :], choice, float("-inf"))
    if OPEN < GROUPS:
        choice = _open_groups(choice, TOKENS, GROUPS_BLOCK, SIZE_BLOCK, OPEN, BEST)
    rank = _ranks(choice, column, TOKENS, COLUMNS, TOP_K)
    taken = (rank >= 0) & there[:, None]
    weights = tl.where(rank >= 0, scores, 0.0)
    if RENORMALIZE:
        weights /= tl.maximum(tl.sum(weights, axis=1), least_sum)[:, None]
    wanted = (rank >= 0) & live[:, None]
    if MOST:
        asked = tl.sum(wanted.to(tl.int32), axis=0)
        tl.atomic_add(loads_ptr + expert, asked, asked > 0, sem="relaxed")
        wanted = wanted & (slot >= 0)[None, :] & (token[:, None] % copies[None, :] == number[None, :])
    at = token[:, None] * TOP_K + rank
    tl.store(experts_ptr + at, tl.where(wanted, slot[None, :], -1), taken)
    tl.store(weights_ptr + at, tl.where(wanted, weights * scale, 0.0), taken)
    if COUNT:
        slot = tl.where(is_expert & (slot >= 0), slot, SLOTS)
        _count(wanted, rank, slot, token, earlier_ptr, counts_ptr, SLOTS, TOP_K)


@triton.jit
def _chosen(experts_ptr, place, num_choices, EXPERTS: tl.constexpr, BINS: tl.constexpr):
    """Experts of a chunk of choices, -1 for none, and how often each of BINS is chosen."""
    chosen = tl.load(experts_ptr + place, place < num_choices, -1)
    return chosen, tl.histogram(tl.where(chosen < 0, EXPERTS, chosen), BINS)


@triton.jit(do_not_specialize=["num_choices"])
def _count_kernel(
    experts_ptr, counts_ptr, num_choices, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, counts = _chosen(experts_ptr, place, num_choices, EXPERTS, BINS)
    expert = tl.arange(0, BINS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + expert, counts, expert < EXPERTS)


@triton.jit(do_not_specialize=["num_choices", "chunks", "most", "rows"])
def _order_kernel(
    experts_ptr, counts_ptr, order_ptr, tiles_ptr, num_choices, chunks, most, rows,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one expert in one chunk of choices. AT_ONCE: that is all of them, and nobody has counted them."""
    me, chunk = tl.program_id(0), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, BINS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if AT_ONCE:
        chosen, counts = _chosen(experts_ptr, place, num_choices, EXPERTS, BINS)
        earlier = 0
    else:
        chosen = tl.load(experts_ptr + place, place < num_choices, -1)
        counts = tl.zeros([BINS], tl.int32)
        before = tl.zeros([BINS], tl.int32)
        for start in range(0, chunks, 8):
            number = start + tl.arange(0, 8)
            inside = (number < chunks)[:, None] & (expert < EXPERTS)[None, :]
            table = tl.load(counts_ptr + number[:, None] * EXPERTS + expert[None, :], inside, 0)
            counts += tl.sum(table, axis=0)
            before += tl.sum(tl.where((number < chunk)[:, None], table, 0), axis=0)
        earlier = tl.sum(tl.where(expert == me, before, 0), axis=0)
    first = tl.sum(tl.where(expert < me, counts, 0), axis=0)
    mine = (chosen == me).to(tl.int32)
    tl.store(order_ptr + first + earlier + tl.cumsum(mine, axis=0) - 1, place, chosen == me)
    if chunk == 0:
        tiles = tl.where(expert < EXPERTS, (counts + rows - 1) // rows, 0)
        begin = tl.sum(tl.where(expert < me, tiles, 0), axis=0)
        count = tl.sum(tl.where(expert == me, counts, 0), axis=0)
        for i in range((count + rows - 1) // rows):
            tl.store(tiles_ptr + begin + i, me)
            tl.store(tiles_ptr + most + begin + i, first + i * rows)
            tl.store(tiles_ptr + 2 * most + begin + i, tl.minimum(count - i * rows, rows))
        if me == EXPERTS - 1:
            for start in range(tl.sum(tiles, axis=0), most, CHUNK):
                number = start + tl.arange(0, CHUNK)
                tl.store(tiles_ptr + number, -1, number < most)


@triton.jit(do_not_specialize=["num_choices", "counters", "most", "rows"])
def _order_counted_kernel(
    experts_ptr, earlier_ptr, counts_ptr, order_ptr, tiles_ptr, num_choices, counters, most, rows,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr, COUNTERS: tl.constexpr, SPAN: tl.constexpr,
    TABLE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has the choices of COUNTERS programs that counted, CHOICES of each, and TILES lines of the table."""
    me, expert = tl.program_id(0), tl.arange(0, COLUMNS)
    inside = tl.arange(0, SPAN)
    choice = me * (COUNTERS * CHOICES) + inside
    valid = (inside < COUNTERS * CHOICES) & (choice < num_choices)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chosen = tl.load(experts_ptr + choice, valid, -1)
    earlier = tl.load(earlier_ptr + choice, chosen >= 0, 0)
    number = me * COUNTERS + tl.arange(0, COUNTERS)
    known = (expert < EXPERTS)[None, :]
    own = tl.load(counts_ptr + number[:, None] * EXPERTS + expert[None, :], (number < counters)[:, None] & known, 0)
    # Lines of the table are added up at the end: warps meet for that.
    all_counts = tl.zeros([TABLE, COLUMNS], tl.int32)
    all_before = tl.zeros([TABLE, COLUMNS], tl.int32)
    for start in range(0, counters, TABLE):
        other = start + tl.arange(0, TABLE)
        at = counts_ptr + other[:, None] * EXPERTS + expert[None, :]
        table = tl.load(at, (other < counters)[:, None] & known, 0)
        all_counts += table
        all_before += tl.where((other < me * COUNTERS)[:, None], table, 0)
    counts, before = tl.sum(all_counts, axis=0), tl.sum(all_before, axis=0)
    ends = tl.cumsum(counts, axis=0)
    firsts = (ends - counts + before)[None, :] + tl.cumsum(own, axis=0) - own
    at = tl.where(chosen < 0, 0, inside // CHOICES * COLUMNS + chosen)
    first = tl.gather(tl.reshape(firsts, [COUNTERS * COLUMNS]), at, axis=0)
    tl.store(order_ptr + first + earlier, choice, chosen >= 0)

    tiles = (counts + rows - 1) // rows
    last = tl.cumsum(tiles, axis=0)
    tile = me * TILES + tl.arange(0, TILES)
    passed = (last[None, :] <= tile[:, None]) & known
    owner = tl.sum(passed.to(tl.int32), axis=1)
    skipped = (tile - tl.sum(tl.where(passed, tiles[None, :], 0), axis=1)) * rows
    begin = tl.sum(tl.where(passed, counts[None, :], 0), axis=1) + skipped
    count = tl.sum(tl.where(expert[None, :] == owner[:, None], counts[None, :], 0), axis=1) - skipped
    is_tile = owner < EXPERTS
    tl.store(tiles_ptr + tile, tl.where(is_tile, owner, -1), tile < most)
    tl.store(tiles_ptr + most + tile, begin, (tile < most) & is_tile)
    tl.store(tiles_ptr + 2 * most + tile, tl.minimum(count, rows), (tile < most) & is_tile)


def route(
    logits: torch.Tensor,
    rule: Rule,
    bias: torch.Tensor | None,
    live: Live | None,
    here: Here | None = None,
    rows: int | None = None,
) -> Routes:
    """See `quire.kernels.moe.routing`. rows: of a tile; None: as the plan says, which may need no order at all."""
    tokens, device = len(logits), logits.device
    how = plan(max(tokens, 1), rule.top_k, rule.experts)
    ordered, slots = rows is not None or not how.direct, rule.experts if here is None else here.num_slots
    experts = torch.empty((tokens, rule.top_k), dtype=torch.int32, device=device)
    weights = torch.empty((tokens, rule.top_k), dtype=torch.float32, device=device)
    counted = _counters(experts, rule.experts, slots) if ordered and rule.groups == 1 else None
    if tokens:
        block, warps = (1 if tokens < _MANY else 4, 1) if counted is None else (_COUNTED, 8)
        pdl = has_pdl(device)
        launch(_choose_kernel, (cdiv(tokens, block),),
            logits, logits if bias is None else bias, experts if live is None else live.slots,
            *((experts, experts, experts) if here is None else here[:3]), experts, weights,
            *(counted or (experts, experts)), tokens, 0 if live is None else live.first, rule.scale, rule.least_sum,
            EXPERTS=rule.experts, TOP_K=rule.top_k, GROUPS=rule.groups, GROUPS_BLOCK=next_power_of_2(rule.groups),
            SIZE_BLOCK=next_power_of_2(rule.experts // rule.groups), OPEN=rule.top_groups, BEST=rule.group_best,
            SIGMOID=rule.scoring == "sigmoid", RENORMALIZE=rule.renormalize, BIAS=bias is not None,
            LIVE=live is not None, SLOTS=slots, MOST=0 if here is None else here.slots.shape[1],
            COUNT=counted is not None, TOKENS=block, PDL=pdl, launch_pdl=pdl, num_warps=warps,
        )  # fmt: skip
    routes = Routes(experts, weights)
    if not ordered:
        return routes
    if counted is not None:
        return _ordered_as_counted(routes, *counted, rows or how.gate_up.rows)
    return _ordered(routes, slots, rows or how.gate_up.rows)


def _room(chosen: torch.Tensor, experts: int, rows: int) -> Tiling:
    """For the order of choices, and its tiles."""
    most = most_tiles(chosen.numel(), experts, rows)
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    return Tiling(order, torch.empty((3, most), dtype=torch.int32, device=chosen.device), rows)


def _counters(chosen: torch.Tensor, experts: int, slots: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """For what `_count` says: of each choice, and of each of its programs and each slot; None: nobody counts."""
    if len(chosen) < _COUNTED_FROM or experts > _COUNTED_EXPERTS:
        return None
    counts = torch.empty((cdiv(len(chosen), _COUNTED), slots), dtype=torch.int32, device=chosen.device)
    return torch.empty_like(chosen), counts


def _ordered_as_counted(routes: Routes, earlier: torch.Tensor, counts: torch.Tensor, rows: int) -> Routes:
    """`_ordered`, after `_count`."""
    chosen, device, (counters, experts) = routes.experts, routes.experts.device, counts.shape
    choices, each = chosen.numel(), _COUNTED * chosen.shape[1]
    order, tiles, _ = tiling = _room(chosen, experts, rows)
    most = tiles.shape[1]
    pdl = has_pdl(device)
    together = max(_FEW // next_power_of_2(each), 1)
    programs = max(cdiv(counters, together), cdiv(most, _TILES))
    launch(_order_counted_kernel, (programs,),
        chosen, earlier, counts, order, tiles, choices, counters, most, rows, EXPERTS=experts,
        COLUMNS=next_power_of_2(experts), CHOICES=each, COUNTERS=together, SPAN=next_power_of_2(together * each),
        TABLE=_TABLE, TILES=_TILES, PDL=pdl, launch_pdl=pdl, num_warps=8,
    )  # fmt: skip
    return routes._replace(tiling=tiling)


def _ordered(routes: Routes, experts: int, rows: int) -> Routes:
    """With the order by expert, in tiles of so many rows."""
    chosen = routes.experts
    choices, device = chosen.numel(), chosen.device
    order, tiles, _ = tiling = _room(chosen, experts, rows)
    most = tiles.shape[1]
    if not choices:
        tiles.fill_(-1)
        return routes._replace(tiling=tiling)
    pdl = has_pdl(device)
    at_once = choices <= _AT_ONCE
    chunk = (_FEW if choices <= _FEW else _AT_ONCE) if at_once else 4 * _FEW
    chunks = cdiv(choices, chunk)
    shape = {
        "EXPERTS": experts, "BINS": next_power_of_2(experts + 1), "CHUNK": chunk, "PDL": pdl, "launch_pdl": pdl,
        "num_warps": 4 if at_once else 8,
    }  # fmt: skip
    counts = chosen
    if not at_once:
        counts = torch.empty((chunks, experts), dtype=torch.int32, device=device)
        launch(_count_kernel, (chunks,), chosen, counts, choices, **shape)
    launch(_order_kernel, (experts, chunks),
        chosen, counts, order, tiles, choices, chunks, most, rows, AT_ONCE=at_once, **shape,
    )  # fmt: skip
    return routes._replace(tiling=tiling)


def sort(routes: Routes, experts: int, here: Here | None = None) -> Routes:
    """With the order that kernels want, of choices made elsewhere. experts: of all ranks."""
    how = plan(max(len(routes.experts), 1), routes.experts.shape[1], experts)
    slots = experts if here is None else here.num_slots
    return routes if how.direct else _ordered(routes, slots, how.gate_up.rows)
