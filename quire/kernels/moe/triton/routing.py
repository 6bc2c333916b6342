"""Choices of experts, their weights, and their order by expert: one kernel for few tokens, two for many.

A program holds the logits of some tokens whole and takes the best one after another. A token goes to an expert once at
most, so the place of a choice among its expert's is how many tokens before it have the same: a running sum. Nothing is
counted by atomics, so the order is that of the tokens, whoever comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.moe.routes import Live, Routes, Rule
from quire.kernels.moe.tiling import Tiling, most_tiles, tile_reference
from quire.kernels.moe.triton.plan import plan
from quire.kernels.triton.launch import has_pdl, next_power_of_2

_TOKENS = (4, 16, 64)  # of a program
_NUMBERS = 8192  # of logits, held by a program at most


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
def _write_tiles(tiles_ptr, expert, counts, places, most, ROWS: tl.constexpr):
    """The table of tiles, from each expert's count of choices and the place of the first."""
    tiles = (counts + ROWS - 1) // ROWS
    begin = tl.cumsum(tiles, axis=0) - tiles
    for first in range(tl.sum(tiles, axis=0), most, 256):
        number = first + tl.arange(0, 256)
        tl.store(tiles_ptr + number, -1, number < most)
    for i in range(tl.max(tiles, axis=0)):
        there = i < tiles
        tl.store(tiles_ptr + begin + i, expert, there)
        tl.store(tiles_ptr + most + begin + i, places + i * ROWS, there)
        tl.store(tiles_ptr + 2 * most + begin + i, tl.minimum(counts - i * ROWS, ROWS), there)


@triton.jit(do_not_specialize=["num_tokens", "first_live", "most"], do_not_specialize_on_alignment=["slots_ptr"])
def _route_kernel(
    logits_ptr, bias_ptr, slots_ptr, experts_ptr, weights_ptr, order_ptr, tiles_ptr, ranks_ptr, counts_ptr,
    num_tokens, first_live, most, scale, least_sum,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, OPEN: tl.constexpr, BEST: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, LIVE: tl.constexpr, TOKENS: tl.constexpr,
    SORT: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    place = tl.arange(0, TOP_BLOCK)[None, :]
    found = tl.zeros([TOKENS, TOP_BLOCK], tl.int32)
    weights = tl.zeros([TOKENS, TOP_BLOCK], tl.float32)
    taken = tl.zeros([TOKENS, COLUMNS], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=1)
        hit = column[None, :] == best[:, None]
        weight = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        choice = tl.where(hit, float("-inf"), choice)
        taken += hit.to(tl.int32)
        found = tl.where(place == i, best[:, None], found)
        weights = tl.where(place == i, weight[:, None], weights)
    if RENORMALIZE:
        weights /= tl.maximum(tl.sum(weights, axis=1), least_sum)[:, None]
    at = token[:, None] * TOP_K + place
    is_choice = there[:, None] & (place < TOP_K)
    number = found // SIZE_BLOCK * SIZE + found % SIZE_BLOCK
    tl.store(experts_ptr + at, tl.where(live[:, None], number, -1), is_choice)
    tl.store(weights_ptr + at, tl.where(live[:, None], weights * scale, 0.0), is_choice)
    if SORT:
        taken = tl.where(live[:, None], taken, 0)
        counts = tl.sum(taken, axis=0)
        before = tl.cumsum(taken, axis=0) - taken
        if ALONE:
            places = tl.cumsum(counts, axis=0) - counts
            before += places[None, :]
        for i in tl.static_range(TOP_K):
            best = tl.sum(tl.where(place == i, found, 0), axis=1)
            rank = tl.sum(tl.where(column[None, :] == best[:, None], before, 0), axis=1)
            if ALONE:
                tl.store(order_ptr + rank, token * TOP_K + i, live)
            else:
                tl.store(ranks_ptr + token * TOP_K + i, rank, live)
        if ALONE:
            _write_tiles(tiles_ptr, expert, counts, places, most, ROWS)
        else:
            tl.store(counts_ptr + tl.program_id(0) * COLUMNS + column, counts)


@triton.jit(do_not_specialize=["num_tokens", "blocks", "most"])
def _order_kernel(
    experts_ptr, ranks_ptr, counts_ptr, order_ptr, tiles_ptr, num_tokens, blocks, most,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same tokens a program as in the kernel before, whose counts of each expert it adds up: of all programs, and
    of those before it."""
    COLUMNS: tl.constexpr = GROUPS_BLOCK * SIZE_BLOCK
    SIZE: tl.constexpr = EXPERTS // GROUPS
    me = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    is_expert = (column % SIZE_BLOCK < SIZE) & (column // SIZE_BLOCK < GROUPS)
    expert = tl.where(is_expert, column // SIZE_BLOCK * SIZE + column % SIZE_BLOCK, -2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([COLUMNS], tl.int32)
    before = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        counts = tl.load(counts_ptr + block[:, None] * COLUMNS + column[None, :], (block < blocks)[:, None], 0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((block < me)[:, None], counts, 0), axis=0)
    places = tl.cumsum(total, axis=0) - total
    before += places
    token = me * TOKENS + tl.arange(0, TOKENS)
    for i in range(TOP_K):
        chosen = tl.load(experts_ptr + token * TOP_K + i, token < num_tokens, -1)
        rank = tl.load(ranks_ptr + token * TOP_K + i, chosen >= 0, 0)
        mine = tl.sum(tl.where(expert[None, :] == chosen[:, None], before[None, :], 0), axis=1)
        tl.store(order_ptr + mine + rank, token * TOP_K + i, chosen >= 0)
    if me == 0:
        _write_tiles(tiles_ptr, expert, total, places, most, ROWS)


def _block_of(tokens: int, columns: int) -> int:
    """Tokens of a program."""
    most = max(min(_TOKENS[-1], _NUMBERS // columns), _TOKENS[0])
    return next((block for block in _TOKENS if block >= tokens and block <= most), most)


def route(
    logits: torch.Tensor, rule: Rule, bias: torch.Tensor | None, live: Live | None, rows: int | None = None
) -> Routes:
    """See `quire.kernels.moe.routing`. rows: of a tile; None: as the plan says, which may need no order at all."""
    tokens, device = len(logits), logits.device
    how = plan(max(tokens, 1), rule.top_k, rule.experts)
    sort = rows is not None or how.direct is None
    rows = rows or how.gate_up.rows
    most = most_tiles(tokens * rule.top_k, rule.experts, rows)
    experts = torch.empty((tokens, rule.top_k), dtype=torch.int32, device=device)
    weights = torch.empty((tokens, rule.top_k), dtype=torch.float32, device=device)
    order = torch.empty(tokens * rule.top_k, dtype=torch.int32, device=device) if sort else experts
    tiles = torch.empty((3, most), dtype=torch.int32, device=device) if sort else experts
    tiling = Tiling(order, tiles, rows) if sort else None
    if not tokens:
        return Routes(experts, weights, None if tiling is None else tiling._replace(tiles=tiles.fill_(-1)))
    groups_block, size_block = next_power_of_2(rule.groups), next_power_of_2(rule.experts // rule.groups)
    columns = groups_block * size_block
    block = _block_of(tokens, columns)
    blocks = -(-tokens // block)
    alone = blocks == 1
    ranks = counts = experts
    if sort and not alone:
        ranks = torch.empty(tokens * rule.top_k, dtype=torch.int32, device=device)
        counts = torch.empty((blocks, columns), dtype=torch.int32, device=device)
    pdl = has_pdl(device)
    shape = {
        "EXPERTS": rule.experts, "TOP_K": rule.top_k, "GROUPS": rule.groups, "GROUPS_BLOCK": groups_block,
        "SIZE_BLOCK": size_block, "TOKENS": block, "ROWS": rows,
        "PDL": pdl, "launch_pdl": pdl, "num_warps": 8 if block * columns >= 4096 else 4,
    }  # fmt: skip
    _route_kernel[(blocks,)](
        logits, logits if bias is None else bias, experts if live is None else live.slots, experts, weights, order,
        tiles, ranks, counts, tokens, 0 if live is None else live.first, most, rule.scale, rule.least_sum,
        TOP_BLOCK=next_power_of_2(rule.top_k), OPEN=rule.top_groups, BEST=rule.group_best,
        SIGMOID=rule.scoring == "sigmoid", RENORMALIZE=rule.renormalize, BIAS=bias is not None, LIVE=live is not None,
        SORT=sort, ALONE=alone, **shape,
    )  # fmt: skip
    if sort and not alone:
        _order_kernel[(blocks,)](
            experts, ranks, counts, order, tiles, tokens, blocks, most, CHUNK=max(4096 // columns, 1), **shape
        )
    return Routes(experts, weights, tiling)


def sort(routes: Routes, experts: int) -> Routes:
    """With the order that kernels want, of choices made elsewhere."""
    tokens, top_k = routes.experts.shape
    how = plan(max(tokens, 1), top_k, experts)
    if how.direct is not None:
        return routes
    return routes._replace(tiling=tile_reference(routes.experts, experts, how.gate_up.rows))
