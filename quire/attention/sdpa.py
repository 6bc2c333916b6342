"""Attention over the paged cache by torch's own fused kernels, on any device that torch knows.

A row's blocks are gathered into one piece, and `scaled_dot_product_attention` runs over that: keys and values cross the
memory three times instead of once. Decode rows of like length go together, padded; prompt chunks go one by one. What a
step consists of is planned from host copies, so nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.attention.base import ALIKE, AttentionInputs, AttentionSpec, LayerCache, PerHead
from quire.attention.expanded import expands, made_of
from quire.attention.grouping import alike
from quire.attention.scored import attend
from quire.platforms.transfers import upload

GATHERED_BYTES = 128 * 1024**2  # of keys, and as many of values, gathered at once, unless one row alone has more
MAX_PADDING, PADDING_TOKENS = 1.5, 128  # see `alike`
SCORES = 1 << 26  # of all heads at once, where queries come three times
MASK_BYTES = 32 * 1024**2  # of a prompt chunk's mask at once
ALONE = 32  # see `_prompts`


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows of as many queries each, which go together, and the tokens that are gathered for them."""

    rows: int
    queries: slice | torch.Tensor  # places of all of theirs
    lines: torch.Tensor  # int64 [rows * kv_heads * blocks]: a head's block each, see `_gathered`
    tokens: int  # gathered of each row, whole blocks
    mask: torch.Tensor  # additive [rows, 1, queries, tokens]: -inf where nothing is seen
    behind: torch.Tensor | None  # the same shape: see `Scores.behind`


@dataclass(frozen=True, slots=True)
class Prompt:
    """Queries of one row, and the tokens from `first` on that they see any of."""

    queries: slice
    lines: torch.Tensor
    tokens: int
    before: int  # tokens that the row has before its queries
    first: int
    rows: int = 1


@dataclass(frozen=True, slots=True)
class SDPAPlan:
    pieces: list[Decodes | Prompt]
    expanded: list[Prompt]  # that are attended for in that form, whose queries count from the first of theirs
    absorbed: int | None = None  # see `ExpandingBackend`


class SDPAttention:
    name = "sdpa"
    reads_host = True
    graph_support = False
    prefix_support = False
    prompt_wave = 0

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._group = spec.num_heads // spec.num_kv_heads
        self._heads = torch.arange(spec.num_kv_heads, device=spec.device)
        token_bytes = spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        self._most_tokens = max(1, GATHERED_BYTES // token_bytes)

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads do not divide among {spec.num_kv_heads} KV heads"
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            return f"torch attends in 16 bits or more, not in {spec.dtype}"
        if spec.kv_dtype != spec.dtype and spec.kv_dtype.itemsize > 1:
            return f"a cache of {spec.kv_dtype} does not go with {spec.dtype}"
        if spec.kv_dtype != spec.dtype and spec.device.type in ("cpu", "mps"):
            return f"no cache of {spec.kv_dtype} on {spec.device.type}"
        return None

    # -- once a step --------------------------------------------------------------------------------------------

    def plan(self, inputs: AttentionInputs) -> SDPAPlan:
        if inputs.first_lens is not None:  # with drafts only the device knows how long rows are
            return SDPAPlan(self._decodes(inputs, inputs.seq_lens.tolist(), inputs.num_queries), [])
        starts, lengths = inputs.query_start_host, inputs.seq_lens_host
        if starts is None or lengths is None:
            raise ValueError("this attention is planned from host copies of the step's rows")
        pieces = self._decodes(inputs, lengths[: inputs.num_decodes], 1) if inputs.num_decodes else []
        expanded = expands(self._spec, inputs)
        shift = inputs.num_decodes if expanded else 0
        prompts: list[Prompt] = []
        for row in range(inputs.num_decodes, inputs.num_rows):
            if starts[row] < starts[row + 1]:
                prompts += self._prompts(inputs, row, slice(starts[row] - shift, starts[row + 1] - shift), lengths[row])
        return SDPAPlan(pieces, prompts, shift) if expanded else SDPAPlan([*pieces, *prompts], [])

    def absorbed(self, plan: SDPAPlan) -> int | None:
        return plan.absorbed

    def _prompts(self, inputs: AttentionInputs, row: int, queries: slice, length: int) -> list[Prompt]:
        """The queries of a row, the last of its `length` tokens; the last one may be apart.

        torch's memory-efficient kernel takes 32 or 64 queries at a time. Where a last one is left alone, and query
        heads share their keys, it takes the heads' for that one's others (torch 2.11).
        """
        count = queries.stop - queries.start
        if count == 1 or count % ALONE != 1 or self._group == 1 or self._spec.device.type != "cuda":
            return [self._prompt(inputs, row, queries, length)]
        last = queries.stop - 1
        return [
            self._prompt(inputs, row, slice(queries.start, last), length - 1),
            self._prompt(inputs, row, slice(last, queries.stop), length),
        ]

    def _decodes(self, inputs: AttentionInputs, lengths: list[int], queries: int) -> list[Decodes | Prompt]:
        size = self._spec.block_size
        firsts = [self._first_block(length - queries + 1) for length in lengths]
        seen = [length - first * size for length, first in zip(lengths, firsts, strict=True)]
        groups = alike(seen, padding=MAX_PADDING, extra=PADDING_TOKENS, most=self._most_tokens, unit=size)
        pieces: list[Decodes | Prompt] = []
        for rows in groups:
            blocks = -(-max(seen[row] for row in rows) // size)
            every = len(rows) == len(lengths)
            index = None if every else upload(torch.tensor(rows), self._spec.device)
            pieces.append(self._decode_piece(inputs, index, len(rows), blocks, queries))
        return pieces

    def _decode_piece(
        self, inputs: AttentionInputs, index: torch.Tensor | None, rows: int, blocks: int, queries: int
    ) -> Decodes:
        """index: the rows; None: the first ones."""
        size, device = self._spec.block_size, self._spec.device
        pick = slice(0, rows) if index is None else index
        ends = inputs.seq_lens[pick].long().unsqueeze(1)
        firsts = ends if inputs.first_lens is None else inputs.first_lens[pick].long().unsqueeze(1)
        begin = torch.zeros_like(ends)
        if self._spec.scores.window:  # `_first_block`, of what the device says
            begin = self._spec.scores.begins((ends - queries).clamp(min=0)) // size
        # Beyond its end a row reads its last block once more: what it holds is its own.
        numbers = torch.minimum(begin + torch.arange(blocks, device=device), (ends - 1).clamp(min=0) // size)
        table = inputs.block_table[inputs.seats[pick].long().unsqueeze(1), numbers].long()
        last = torch.minimum(firsts + torch.arange(queries, device=device), ends).unsqueeze(2)  # [rows, queries, 1]
        token = (begin * size + torch.arange(blocks * size, device=device)).unsqueeze(1)
        visible = self._spec.scores.visible(token, last - 1).unsqueeze(1)
        behind = self._spec.scores.behind(token, last - 1)
        behind = None if behind is None else behind.unsqueeze(1)
        mask = torch.zeros(visible.shape, dtype=self._spec.dtype, device=device).masked_fill_(~visible, -math.inf)
        places: slice | torch.Tensor = slice(0, rows * queries)
        if index is not None:
            places = (index.unsqueeze(1) * queries + torch.arange(queries, device=device)).flatten()
        return Decodes(rows, places, self._lines(table), blocks * size, mask, behind)

    def _prompt(self, inputs: AttentionInputs, row: int, queries: slice, length: int) -> Prompt:
        """The queries of a row are the last of its `length` tokens."""
        size, before = self._spec.block_size, length - (queries.stop - queries.start)
        first, last = self._first_block(before + 1), -(-length // size)
        lines = self._lines(inputs.block_table[inputs.seats[row : row + 1].long(), first:last].long())
        return Prompt(queries, lines, (last - first) * size, before, first * size)

    def _first_block(self, length: int) -> int:
        """The first one that the last of `length` tokens sees."""
        return self._spec.scores.first_seen(max(length - 1, 0)) // self._spec.block_size

    def _lines(self, table: torch.Tensor) -> torch.Tensor:
        """table: int64 [rows, blocks]."""
        each = table.unsqueeze(1) * (self._spec.num_kv_heads * self._spec.planes) + self._heads.unsqueeze(1)
        return each.flatten()

    # -- once a layer -------------------------------------------------------------------------------------------

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: SDPAPlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        out = q.new_zeros(*q.shape[:2], self._spec.head_dim)  # what belongs to nobody stays finite
        for piece in plan.pieces:
            k = self._gathered(cache.k, piece)
            v = k if self._spec.value_dim else self._gathered(cache.v, piece)  # whole rows: fused kernels want it
            if isinstance(piece, Decodes):
                out[piece.queries] = self._attend_decodes(q[piece.queries], k, v, piece, scale, heads)
            else:
                out[piece.queries] = self._attend_prompt(q[piece.queries], k, v, piece, scale, heads)
        return out[..., : self._spec.out_dim].flatten(1)

    def run_expanded(
        self, q: torch.Tensor, cache: LayerCache, weight: torch.Tensor, plan: SDPAPlan, scale: float, out: torch.Tensor
    ) -> None:
        out.zero_()  # what belongs to nobody stays finite
        for piece in plan.expanded:
            rows = self._gathered(cache.k, piece)[0, 0]
            for heads, queries, k, v in made_of(rows, weight, q[piece.queries]):
                y = self._attend_prompt(queries, k, v, piece, scale, ALIKE)
                out[piece.queries, heads] = y[..., : out.shape[2]]

    def _gathered(self, cache: torch.Tensor, piece: Decodes | Prompt) -> torch.Tensor:
        """[rows, kv_heads, tokens, head_dim]."""
        blocks, kv_heads, size, dim = cache.shape
        seen = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        # The cache as lines of a head's block each; those of other layers may lie between.
        lines = seen.as_strided(
            ((blocks - 1) * cache.stride(0) // (size * dim) + kv_heads, size * dim), (size * dim, 1)
        )
        found = lines.index_select(0, piece.lines).view(cache.dtype).to(self._spec.dtype)
        return found.view(piece.rows, kv_heads, piece.tokens, dim)

    def _attend_decodes(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Decodes, scale: float, heads: PerHead
    ) -> torch.Tensor:
        """A KV head's query heads stand in line as queries: its keys are read once for all of them."""
        (rows, kv_heads, _, dim), group = k.shape, self._group
        queries = len(q) // rows
        wide = q.shape[2]
        grouped = q.view(rows, queries, kv_heads, group, wide).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, wide)
        mask, behind = piece.mask, piece.behind
        if queries > 1:
            mask = mask.repeat(1, 1, group, 1)
            behind = None if behind is None else behind.repeat(1, 1, group, 1)
        lines = PerHead(
            *(None if own is None else own.repeat_interleave(queries).view(kv_heads, -1, 1) for own in heads)
        )
        y = attend(grouped, k, v, mask, scale=scale, scores=self._spec.scores, heads=lines, behind=behind)
        return y.view(rows, kv_heads, group, queries, dim).permute(0, 3, 1, 2, 4).reshape(len(q), -1, dim)

    def _attend_prompt(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prompt: Prompt, scale: float, heads: PerHead
    ) -> torch.Tensor:
        """KV heads take the place of rows, so that each one's keys are there for all its query heads."""
        (_, kv_heads, tokens, dim), scores = k.shape, self._spec.scores
        group = q.shape[1] // kv_heads
        grouped = q.view(-1, kv_heads, group, q.shape[2]).permute(1, 2, 0, 3)  # [kv_heads, group, queries, dim]
        k, v = (x[0].unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
        lines = PerHead(*(None if own is None else own.view(kv_heads, group, 1, 1) for own in heads))
        if prompt.before == 0 and scores.first_seen(len(q) - 1) == 0:
            k, v = k[:, :, : len(q)], v[:, :, : len(q)]
            y = attend(grouped, k, v, None, is_causal=True, scale=scale, scores=scores, heads=lines)
        elif len(q) == 1:  # sees all from some token on, and needs no mask
            seen = slice(scores.first_seen(prompt.before) - prompt.first, prompt.before + 1 - prompt.first)
            k, v = k[:, :, seen], v[:, :, seen]
            token = torch.arange(prompt.before + 1 - k.shape[2], prompt.before + 1, device=q.device)
            behind = scores.behind(token, token[-1])
            y = attend(grouped, k, v, None, scale=scale, scores=scores, heads=lines, behind=behind)
        else:
            token = torch.arange(prompt.first, prompt.first + tokens, device=q.device)
            last = torch.arange(prompt.before, prompt.before + len(q), device=q.device).unsqueeze(1)
            step = max(1, MASK_BYTES // tokens // ALONE) * ALONE
            if scores.dual_chunk:
                step = max(1, min(step, SCORES // (tokens * kv_heads * group)))
            parts = zip(grouped.split(step, 2), last.split(step), strict=True)
            y = torch.cat([
                attend(
                    part, k, v, scores.visible(token, seen), scale=scale, scores=scores, heads=lines,
                    behind=scores.behind(token, seen),
                )
                for part, seen in parts
            ], 2)  # fmt: skip
        return y.permute(2, 0, 1, 3).reshape(len(q), -1, dim)
