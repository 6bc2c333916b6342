"""From plan and seats to the inputs of a forward pass, written straight into the buffers that graphs read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.attention.base import FAR, PromptWork, SharedPrefix, prefix_tiles
from quire.attention.context import AttentionInputs
from quire.kernels.step.step import StepBuffers, gather
from quire.types.plan import StepPlan
from quire.worker.prefixes import PrefixLayout, PrefixRows
from quire.worker.seats import DeviceSeats
from quire.worker.staging import ALIGNED, Span, Staging

if TYPE_CHECKING:
    from quire.worker.seat_drafts import SeatDrafts

# The library has kernels for every few rows. One that was never used is loaded at its first launch, which waits for the
# device; so on a GPU steps beyond the graphs come in few sizes, and `Runner.prepare` goes through them beforehand.
SIZE_STEP = 64
_EXACT_SIZES = 128  # up to here products have kernels of our own, for any number of rows


def round_size(count: int) -> int:
    """The size, of tokens or rows, that `count` of them are padded to."""
    return count if count <= _EXACT_SIZES else -(-count // SIZE_STEP) * SIZE_STEP


def prompt_work(num_tokens: np.ndarray, lengths: np.ndarray) -> PromptWork:
    """Of rows of so many queries each, the last of so many tokens."""
    queries, seen = num_tokens.astype(np.int64), lengths.astype(np.int64)
    return PromptWork(int(seen.sum()), int((queries * (2 * seen - queries + 1)).sum()) // 2)


def whole_prompts(num_tokens: int, num_rows: int) -> PromptWork:
    """About that of up to so many rows that see nothing but their own queries, so many tokens in all: as if it were
    one. Empty rows may have a token each."""
    return PromptWork(num_tokens + num_rows, num_tokens * (num_tokens + 1) // 2)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs on the device. Decode-only steps may be padded with seat 0, others with tokens of nobody."""

    num_rows: int  # padding included
    num_tokens: int
    seats: torch.Tensor  # int32 [rows]
    buffers: StepBuffers  # views of this step's length
    attention: AttentionInputs
    sample_rows: torch.Tensor | None  # int32 [samples]: rows that sample; None: all
    logit_tokens: torch.Tensor | None  # int32 [samples, padded with 0]: their last tokens; None: token i of row i
    sample_index: torch.Tensor | None  # int32 [rows]: place among the samples or -1; None: all
    sample_rows_np: np.ndarray  # plan rows that sample


class BatchBuilder:
    """Owns the step's input buffers.

    prefixes: None for an attention that cannot make use of shared prefixes. pads: steps come in round sizes.
    host_copies: for an attention that reads them; None: on a CPU.
    """

    def __init__(
        self,
        seats: DeviceSeats,
        prefixes: PrefixRows | None,
        max_rows: int,
        max_tokens: int,
        max_seq_len: int,
        device: torch.device,
        *,
        pads: bool = False,
        host_copies: bool | None = None,
    ) -> None:
        def ints(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        self._seats = seats
        self._prefixes = prefixes
        self._max_seq_len = max_seq_len
        self._host_copies = device.type == "cpu" if host_copies is None else host_copies
        # What decode rows are: seats, and behind them the arrays of SharedPrefix, so that one copy brings it all.
        stride = -(-max_rows // ALIGNED) * ALIGNED
        max_tiles = prefix_tiles(max_rows, prefixes.group) if prefixes else 0
        self._rows = ints(3 * stride + 4 * max_tiles if prefixes else stride)
        self.seats, self._tokens_of_row, self._members = (self._rows[i * stride :][:max_rows] for i in range(3))
        self._tiles = self._rows[3 * stride :].view(-1, 4)
        self._stride = stride
        self.one_token_each = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._max_rows, self._pads = max_rows, pads
        max_tokens = self.padded(max_tokens)
        self._input_ids, self._positions, self._slots = ints(max_tokens), ints(max_tokens), ints(max_tokens)
        self._seq_lens = ints(max_rows)
        self._row_numbers = np.arange(max_rows, dtype=np.int32)
        self._seats_there = np.zeros(max_rows, dtype=np.int32)  # what `self.seats` holds
        self._layout_there: PrefixLayout | None = None  # what the arrays behind it were last made from

    def padded(self, count: int) -> int:
        """The size, of tokens or rows, that `count` of them are padded to here."""
        return round_size(count) if self._pads else count

    def decode_size(self, rows: int) -> int:
        """The rows of an eager step of `rows` decode rows."""
        return min(self.padded(rows), self._max_rows)

    def layout(self, plan: StepPlan) -> PrefixLayout | None:
        """Which of the plan's decode rows share a prefix; None if none do. To be asked once for every plan."""
        if self._prefixes is None:
            return None
        self._prefixes.take(plan)
        return self._prefixes.layout(plan.seats[: plan.num_decodes])

    def is_far(self, plan: StepPlan) -> bool:
        """Whether one of the plan's prompt chunks is."""
        return bool((self._before(plan) >= FAR).any())

    def is_whole(self, plan: StepPlan) -> bool:
        """Whether all of the plan's prompt chunks are their prompts' first."""
        return not self._before(plan).any()

    def _before(self, plan: StepPlan) -> np.ndarray:
        """Tokens that are there already of each of the plan's prompt chunks."""
        before = self._seats.num_computed_np
        if plan.admits:  # not taken over yet
            before = before.copy()
            before[[admit.seat for admit in plan.admits]] = [admit.num_computed for admit in plan.admits]
        of_prompts: np.ndarray = before[plan.seats[plan.num_decodes :]]
        return of_prompts

    def decode(
        self,
        plan: StepPlan,
        size: int,
        layout: PrefixLayout | None,
        staging: Staging,
        drafts: SeatDrafts | None = None,
    ) -> Batch:
        """A step of decode rows only. Sends seats and layout only if they differ from those of the step before.

        drafts: of a plan with drafts.
        """
        rows = plan.num_rows
        there = self._seats_there
        writes = self._seats.stage(plan, staging)
        changed = not np.array_equal(there[:rows], plan.seats) or there[rows:size].any()
        if changed:
            there[:rows], there[rows:] = plan.seats, 0
        shares = layout is not None and (changed or layout is not self._layout_there)
        if changed or shares:
            span = staging.put(self._packed(layout) if layout else there[: max(size, rows)])
            self._layout_there = layout
        if writes or changed or shares:
            staging.send()
            self._seats.apply(writes, staging)
            if changed or shares:
                self._rows[: span.stop - span.start].copy_(staging.view(span))
        if drafts is not None:
            return self.drafted_views(size, drafts)
        return self.decode_views(size, plan, shares_prefix=layout is not None)

    def _packed(self, layout: PrefixLayout) -> np.ndarray:
        """`self._rows` as it shall be, as far as it is used."""
        stride, tiles = self._stride, layout.tiles.reshape(-1)
        packed = np.zeros(len(self._rows), dtype=np.int32)
        parts = (self._seats_there, layout.tokens_of_row, layout.members, tiles)
        for place, part in enumerate(parts):
            packed[place * stride :][: len(part)] = part
        return packed

    def decode_views(self, size: int, plan: StepPlan | None = None, *, shares_prefix: bool = False) -> Batch:
        """The batch of `size` decode rows as graphs see it: always the same memory."""
        host = plan is not None and self._host_copies
        nobody = [0] * (size - plan.num_rows) if host and plan else []
        return Batch(
            num_rows=size,
            num_tokens=size,
            seats=self.seats[:size],
            buffers=self._buffers(size, size),
            attention=AttentionInputs(
                num_rows=size,
                num_tokens=size,
                num_decodes=size,
                max_query_len=0,
                max_seq_len=plan.max_seq_len if host and plan else self._max_seq_len,
                seats=self.seats[:size],
                query_start=self.one_token_each[: size + 1],
                seq_lens=self._seq_lens[:size],
                block_table=self._seats.state.block_table,
                prefix=self._shared_prefix(size) if shares_prefix else None,
                seats_host=plan.seats.tolist() + nobody if host and plan else None,
                query_start_host=list(range(size + 1)) if host else None,
                seq_lens_host=self._lengths(plan, nobody) if host and plan else None,
            ),
            sample_rows=None,
            logit_tokens=None,
            sample_index=None,
            sample_rows_np=self._row_numbers[:size],
        )

    def _lengths(self, plan: StepPlan, nobody: list[int]) -> list[int]:
        """Of a step's decode rows, those of nobody behind them."""
        lengths: list[int] = (self._seats.num_computed_np[plan.seats] + 1).tolist()
        return lengths + [1 for _ in nobody]

    def drafted_views(self, size: int, drafts: SeatDrafts) -> Batch:
        """The batch of `size` decode rows with drafts, as graphs see it; what it samples is found in its `drafts`."""
        tokens = size * drafts.width
        batch = self.decode_views(size)
        attention = replace(
            batch.attention,
            num_tokens=tokens,
            query_start=self.one_token_each[:1],  # nobody asks
            num_queries=drafts.width,
            first_lens=drafts.buffers(size).first_lens,
        )
        return replace(batch, num_tokens=tokens, buffers=self._buffers(size, tokens), attention=attention)

    def _shared_prefix(self, size: int) -> SharedPrefix:
        assert self._prefixes is not None
        tiles = self._tiles[: prefix_tiles(size, self._prefixes.group)]
        return SharedPrefix(self._tokens_of_row[:size], self._members[:size], tiles)

    def mixed(self, plan: StepPlan, layout: PrefixLayout | None, staging: Staging) -> Batch:
        """A step with catch-up rows, built by the `gather` kernel."""
        rows = plan.num_rows
        query_start = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(plan.num_tokens, out=query_start[1:])
        tokens = self.padded(int(query_start[-1]))
        sample_rows = np.flatnonzero(plan.samples).astype(np.int32)
        sample_index = np.full(rows, -1, dtype=np.int32)
        sample_index[sample_rows] = self._row_numbers[: len(sample_rows)]
        logit_tokens_np = np.zeros(self.padded(len(sample_rows)), dtype=np.int32)
        logit_tokens_np[: len(sample_rows)] = query_start[1:][sample_rows] - 1
        max_query_len = int(plan.num_tokens[plan.num_decodes :].max())

        writes = self._seats.stage(plan, staging)
        arrays = (plan.seats, query_start, plan.token_ids, sample_rows, logit_tokens_np, sample_index)
        spans = [staging.put(values) for values in arrays]
        shared = self._put_padded(layout, plan.num_decodes, staging) if layout else []
        staging.send()
        self._seats.apply(writes, staging)
        seats, starts, ids, sampling, logit_tokens, index = (staging.view(span) for span in spans)
        prefix = None
        if shared:
            tokens_of_row, members, tiles = (staging.view(span) for span in shared)
            prefix = SharedPrefix(tokens_of_row, members, tiles.view(-1, 4))
        self._seats_there[:] = -1  # the decode rows' seats are sent anew at the next decode step
        buffers = self._buffers(rows, tokens)
        longest = max(max_query_len, tokens - int(query_start[-1]))
        gather(self._seats.state, buffers, seats, starts, ids, plan.num_decodes, longest)
        host, lengths = self._host_copies, self._seats.num_computed_np[plan.seats] + plan.num_tokens
        return Batch(
            num_rows=rows,
            num_tokens=tokens,
            seats=seats,
            buffers=buffers,
            attention=AttentionInputs(
                num_rows=rows,
                num_tokens=tokens,
                num_decodes=plan.num_decodes,
                max_query_len=max_query_len,
                max_seq_len=plan.max_seq_len,
                prompts=prompt_work(plan.num_tokens[plan.num_decodes :], lengths[plan.num_decodes :]),
                is_far=self.is_far(plan),
                seats=seats,
                query_start=starts,
                seq_lens=buffers.seq_lens,
                block_table=self._seats.state.block_table,
                prefix=prefix,
                seats_host=plan.seats.tolist() if host else None,
                query_start_host=query_start.tolist() if host else None,
                seq_lens_host=lengths.tolist() if host else None,
            ),
            sample_rows=sampling,
            logit_tokens=logit_tokens,
            sample_index=index,
            sample_rows_np=sample_rows,
        )

    def _put_padded(self, layout: PrefixLayout, rows: int, staging: Staging) -> list[Span]:
        """The three arrays of a SharedPrefix of so many rows."""
        assert self._prefixes is not None
        members = np.zeros(rows, dtype=np.int32)
        members[: len(layout.members)] = layout.members
        tiles = np.zeros((prefix_tiles(rows, self._prefixes.group), 4), dtype=np.int32)
        tiles[: len(layout.tiles)] = layout.tiles
        return [staging.put(values) for values in (layout.tokens_of_row, members, tiles.reshape(-1))]

    def _buffers(self, rows: int, tokens: int) -> StepBuffers:
        return StepBuffers(
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            slots=self._slots[:tokens],
            seq_lens=self._seq_lens[:rows],
        )
