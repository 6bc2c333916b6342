"""Attention on a CPU with torch's own kernels: gather a row's blocks into one piece, then fused attention on it.

Decode rows of similar length are attended together. The gathered piece is scratch memory small enough to stay in the
cache, so that a step reads the KV cache from memory once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.base import ALIKE, AttentionSpec, PerHead, Scores
from quire.attention.context import AttentionInputs, LayerCache
from quire.attention.expanded import expands, made_of
from quire.attention.grouping import alike
from quire.attention.scored import attend

SCRATCH_TOKENS = 4096  # gathered at a time for decode rows, unless one row alone has more
# Decode rows are attended together if the longest has at most this many times the shortest's tokens, and a bit.
MAX_PADDING, PADDING_TOKENS = 1.25, 64
SCORES = 1 << 26  # of all heads at once, where queries come three times
QUERY_CHUNK = 512  # queries of a prompt attended at a time when they need a mask
# Prompt chunks are padded to multiples of these, for torch keeps the code it made for every shape it has ever seen.
QUERY_STEP, TOKEN_STEP = 32, 128


@dataclass(frozen=True, slots=True)
class Gather:
    """The blocks of some rows as lines of a cache seen as [lines, block_size * head_dim], a head's block each."""

    index: torch.Tensor  # int64 [rows * kv_heads * blocks]
    rows: int
    start: int  # first token gathered, of all rows or, for decode rows, 0: each counts from its own first
    num_tokens: int  # of each row, whole blocks

    def slice(self, seen: range) -> slice:
        return slice(seen.start - self.start, seen.stop - self.start)

    def __call__(self, cache: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """→ [rows, kv_heads, num_tokens, head_dim], in scratch memory."""
        blocks, kv_heads, block_size, head_dim = cache.shape
        width = block_size * head_dim
        lines = (blocks - 1) * cache.stride(0) // width + kv_heads
        piece = scratch[: len(self.index) * width].view(len(self.index), width)
        torch.index_select(cache.as_strided((lines, width), (width, 1)), 0, self.index, out=piece)
        return piece.view(self.rows, kv_heads, self.num_tokens, head_dim)


@dataclass(frozen=True, slots=True)
class How:
    """Of a layer: what becomes of the products of its queries and keys."""

    scale: float
    scores: Scores
    heads: PerHead


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows of one query each, attended together."""

    queries: slice | torch.Tensor
    seen: slice  # tokens of the gathered piece that any of the rows sees
    mask: torch.Tensor | None  # [rows, 1, 1, seen]; None: each row sees all of them
    behind: torch.Tensor | None  # int [rows, 1, 1, seen]: see `Scores.behind`

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, how: How) -> None:
        heads = q.shape[1]
        kv_heads, head_dim = k.shape[1], k.shape[3]
        # A KV head's query heads take the place of queries: the head's keys are read once for all of them.
        grouped = q[self.queries].view(-1, kv_heads, heads // kv_heads, q.shape[2])
        lines = PerHead(*(None if own is None else own.view(kv_heads, -1, 1) for own in how.heads))
        k, v = k[:, :, self.seen], v[:, :, self.seen]
        y = attend(
            grouped, k, v, self.mask, scale=how.scale, scores=how.scores, heads=lines, behind=self.behind
        )  # fmt: skip
        out[self.queries] = y.view(-1, heads, head_dim)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Consecutive queries of one row, padded at the end with some that nobody reads."""

    queries: slice
    padding: int
    seen: slice
    mask: torch.Tensor | None  # [queries + padding, seen]; None: causal, as many queries as tokens
    behind: torch.Tensor | None = None  # int, the same shape, with a mask: see `Scores.behind`

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, how: How) -> None:
        kv_heads = k.shape[1]
        group = q.shape[1] // kv_heads
        queries = torch.nn.functional.pad(q[self.queries], (0, 0, 0, 0, 0, self.padding))
        grouped = queries.view(-1, kv_heads, group, q.shape[2]).permute(1, 2, 0, 3)
        k, v = (x[0, :, None, self.seen].expand(-1, group, -1, -1) for x in (k, v))
        lines = PerHead(*(None if own is None else own.view(kv_heads, group, 1, 1) for own in how.heads))
        y = attend(
            grouped, k, v, self.mask, is_causal=self.mask is None, scale=how.scale, scores=how.scores, heads=lines,
            behind=self.behind,
        ).permute(2, 0, 1, 3)  # fmt: skip
        part = out[self.queries]
        part.view(-1, kv_heads, group, out.shape[2]).copy_(y[: len(part), ..., : out.shape[2]])


Pieces = list[tuple[Gather, list[Decodes | PromptChunk]]]


@dataclass(frozen=True, slots=True)
class CPUPlan:
    pieces: Pieces
    expanded: Pieces  # prompts that are attended for in that form, whose queries count from the first of theirs
    absorbed: int | None = None  # see `ExpandingBackend`


class TorchCPUAttention:
    name = "torch_cpu"
    reads_host = True
    graph_support = False
    prefix_support = False
    prompt_wave = 0

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._kv_heads = torch.arange(spec.num_kv_heads)
        self._is_narrow = spec.kv_dtype.itemsize == 1
        self._kept = torch.uint8 if self._is_narrow else spec.dtype  # what is gathered
        self._scratch = [torch.empty(0, dtype=self._kept) for _ in "kv"]
        self._reserve(min(SCRATCH_TOKENS, spec.max_rows * spec.max_seq_len))

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"needs a CPU, not {spec.device.type}"
        if spec.kv_dtype == spec.dtype or spec.kv_dtype.itemsize == 1:
            return None
        return f"keeps keys and values in {spec.dtype}, not {spec.kv_dtype}"

    def plan(self, inputs: AttentionInputs) -> CPUPlan:
        if inputs.first_lens is not None:
            return self._plan_drafted(inputs, inputs.first_lens)
        starts, lengths = inputs.query_start_host, inputs.seq_lens_host
        if starts is None or lengths is None:
            raise ValueError("a step on a CPU must come with host copies of its rows")
        plan, prompts = Pieces(), Pieces()
        expanded, size = expands(self._spec, inputs), self._spec.block_size
        # Each row's tokens count from the first block that it sees any of.
        firsts = [self._first_seen(length) // size for length in lengths[: inputs.num_decodes]]
        ends = [length - first * size for length, first in zip(lengths, firsts, strict=False)]
        for rows in self._alike(ends):
            gather = self._gather_decodes(inputs, rows, firsts, max(ends[row] for row in rows))
            plan.append(
                (
                    gather,
                    [self._decodes(rows, lengths, [firsts[row] * size for row in rows], inputs.num_decodes, gather)],
                )
            )
        for row in range(inputs.num_decodes, inputs.num_rows):
            before = lengths[row] - (starts[row + 1] - starts[row])
            seen = range(self._first_seen(before + 1), _round_up(lengths[row], TOKEN_STEP))
            gather = self._gather(inputs, [row], seen)
            shift = inputs.num_decodes if expanded else 0
            prompts.append((gather, self._chunks(starts[row] - shift, starts[row + 1] - shift, before, gather)))
        self._reserve(max((gather.rows * gather.num_tokens for gather, _ in plan + prompts), default=0))
        return CPUPlan(plan, prompts, inputs.num_decodes) if expanded else CPUPlan(plan + prompts, [])

    def _plan_drafted(self, inputs: AttentionInputs, first_lens: torch.Tensor) -> CPUPlan:
        """Rows of several queries, each a chunk at the end of its text; what is behind it is padding."""
        plan = Pieces()
        for row, (first, last) in enumerate(zip(first_lens.tolist(), inputs.seq_lens.tolist(), strict=True)):
            start, before = row * inputs.num_queries, first - 1
            gather = self._gather(inputs, [row], range(self._first_seen(first), _round_up(last, TOKEN_STEP)))
            plan.append((gather, self._chunks(start, start + last - before, before, gather)))
        self._reserve(max((gather.rows * gather.num_tokens for gather, _ in plan), default=0))
        return CPUPlan(plan, [])

    def absorbed(self, plan: CPUPlan) -> int | None:
        return plan.absorbed

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: CPUPlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        how = How(scale, self._spec.scores, heads)
        out = q.new_zeros(*q.shape[:2], self._spec.head_dim)  # what belongs to nobody stays finite
        for gather, pieces in plan.pieces:
            k = self._gathered_from(cache.k, gather, self._scratch[0])
            # Whole rows of latents too: fused kernels want it.
            v = k if self._spec.value_dim else self._gathered_from(cache.v, gather, self._scratch[1])
            for piece in pieces:
                piece.attend(q, k, v, out, how)
        return out[..., : self._spec.out_dim].flatten(1)

    def run_expanded(
        self, q: torch.Tensor, cache: LayerCache, weight: torch.Tensor, plan: CPUPlan, scale: float, out: torch.Tensor
    ) -> None:
        how = How(scale, self._spec.scores, ALIKE)
        for gather, pieces in plan.expanded:
            seen = max(piece.seen.stop for piece in pieces)
            rows = self._gathered_from(cache.k, gather, self._scratch[0])[0, 0, :seen]
            for heads, queries, k, v in made_of(rows, weight, q):
                for piece in pieces:
                    piece.attend(queries, k, v, out[:, heads], how)

    def _gathered_from(self, cache: torch.Tensor, gather: Gather, scratch: torch.Tensor) -> torch.Tensor:
        """In the type of queries; of 8 bits, bytes are gathered and then widened."""
        if not self._is_narrow:
            return gather(cache, scratch)
        return gather(cache.view(torch.uint8), scratch).view(self._spec.kv_dtype).to(self._spec.dtype)

    # -- planning -----------------------------------------------------------------------------------------------

    def _alike(self, lengths: list[int]) -> list[list[int]]:
        """Row numbers in groups of similar length, each small enough for the scratch memory."""
        size = self._spec.block_size
        return alike(lengths, padding=MAX_PADDING, extra=PADDING_TOKENS, most=SCRATCH_TOKENS, unit=size)

    def _gather_decodes(self, inputs: AttentionInputs, rows: list[int], firsts: list[int], end: int) -> Gather:
        """Up to token `end` of each row, counted from block `firsts[row]`, all 0 without a window. With one, nothing is
        read that the row does not hold, such as blocks that it has given back."""
        if not self._spec.scores.window:
            return self._gather(inputs, rows, range(end))
        assert inputs.seq_lens_host is not None
        size, seats = self._spec.block_size, inputs.seats[rows].long()
        lasts = torch.tensor([(inputs.seq_lens_host[row] - 1) // size for row in rows])
        blocks = torch.tensor([firsts[row] for row in rows])[:, None] + torch.arange(-(-end // size))
        table = inputs.block_table[seats[:, None], blocks.minimum(lasts[:, None])].long()
        return self._gathered(table, 0)

    def _gather(self, inputs: AttentionInputs, rows: list[int], seen: range) -> Gather:
        """seen: the tokens that any query of the rows sees; what lies beyond a row's end is read, and masked."""
        size = self._spec.block_size
        first, end = seen.start // size, -(-seen.stop // size)
        table = inputs.block_table[inputs.seats[rows].long(), first:end].long()
        if table.shape[1] < end - first:  # past the table's end: the null block
            table = torch.nn.functional.pad(table, (0, end - first - table.shape[1]))
        return self._gathered(table, first * size)

    def _gathered(self, table: torch.Tensor, start: int) -> Gather:
        spec = self._spec
        index = table[:, None, :] * (spec.num_kv_heads * spec.planes) + self._kv_heads[:, None]
        rows, blocks = table.shape
        return Gather(index.flatten(), rows, start, blocks * spec.block_size)

    def _first_seen(self, length: int) -> int:
        """The first token that the last of `length` tokens sees."""
        return self._spec.scores.first_seen(length - 1)

    def _decodes(
        self, rows: list[int], lengths: list[int], begins: list[int], num_decodes: int, gather: Gather
    ) -> Decodes:
        """begins: the tokens that the rows are gathered from."""
        ends = [lengths[row] - begin for row, begin in zip(rows, begins, strict=True)]
        firsts = [self._first_seen(lengths[row]) - begin for row, begin in zip(rows, begins, strict=True)]
        seen = range(min(firsts), max(ends))
        mask = None
        own = torch.tensor(begins)[:, None]  # rows are gathered from tokens of their own on
        behind = self._spec.scores.behind(
            torch.arange(seen.start, seen.stop) + own, torch.tensor(ends)[:, None] - 1 + own
        )
        behind = None if behind is None else behind[:, None, None]
        if len(set(zip(firsts, ends, strict=True))) > 1:
            tokens = torch.arange(seen.start, seen.stop)
            visible = (tokens >= torch.tensor(firsts)[:, None]) & (tokens < torch.tensor(ends)[:, None])
            mask = self._additive(visible)[:, None, None]
        queries = slice(0, num_decodes) if len(rows) == num_decodes else torch.tensor(rows)
        return Decodes(queries, gather.slice(seen), mask, behind)

    def _chunks(self, start: int, end: int, before: int, gather: Gather) -> list[Decodes | PromptChunk]:
        """The queries [start, end) of a row that has `before` tokens in the cache from earlier steps."""
        if before == 0 and self._first_seen(end - start) == 0:
            padded = _round_up(end - start, QUERY_STEP)
            return [PromptChunk(slice(start, end), padded - (end - start), gather.slice(range(padded)), None)]
        pieces: list[Decodes | PromptChunk] = []
        step = QUERY_CHUNK
        if self._spec.scores.dual_chunk:
            step = max(1, min(step, SCORES // (gather.num_tokens * self._spec.num_heads)))
        for begin in range(start, end, step):
            stop = min(begin + step, end)
            padded = _round_up(stop - begin, QUERY_STEP)
            first = before + begin - start
            positions = torch.arange(first, first + padded)[:, None]
            last = min(_round_up(before + stop - start, TOKEN_STEP), gather.start + gather.num_tokens)
            seen = range(self._first_seen(first + 1), last)
            tokens = torch.arange(seen.start, seen.stop)
            mask = self._additive(self._spec.scores.visible(tokens, positions))
            behind = self._spec.scores.behind(tokens, positions)
            padding = padded - (stop - begin)
            pieces.append(PromptChunk(slice(begin, stop), padding, gather.slice(seen), mask, behind))
        return pieces

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        return torch.zeros(visible.shape, dtype=self._spec.dtype).masked_fill_(~visible, float("-inf"))

    def _reserve(self, tokens: int) -> None:
        values = -(-tokens // self._spec.block_size) * self._spec.block_size
        values *= self._spec.num_kv_heads * self._spec.head_dim
        if len(self._scratch[0]) < values:
            self._scratch = [torch.empty(values, dtype=self._kept) for _ in "kv"]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
